"""GET /warmline/models and POST /warmline/models/{name}/load, unload, pin: the owner's view of the served models."""

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from warmline_common.process.redaction import quote_text
from warmline_common.protocol.keeper import ModelStage
from warmline_proxy.errors import ClientError, bad_request, decode_error_body, service_unavailable
from warmline_proxy.http.bodies import BodyReader, json_response
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.models.switcher import ModelSwitcher
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.keeper_client import KeeperCallError, KeeperRefusalError

T = TypeVar("T")


class ServedModelReport(msgspec.Struct, kw_only=True):
    """One model.  Bytes are 0 while they are unknown."""

    name: str
    aliases: list[str] = []
    default: bool
    stage: ModelStage
    pinned: bool
    idle_s: float = 0.0
    weight_bytes: int = 0
    need_bytes: int = 0  # weights, a prefill step and a context of 8,192 tokens
    kv_bytes: int = 0  # present budget for conversations
    resident_bytes: int = 0  # of these, as last heard
    running: int = 0
    waiting: int = 0  # for a place, or for the model to be loaded
    last_used_at: float = 0.0  # Unix seconds; 0: never
    held_bytes: int = 0  # by its process: weights, a prefill step and the budget
    load_s: float = 0.0  # duration of the last load
    reason: str = ""  # why it is not loaded
    wait_reason: str = ""  # why it is not being loaded yet, though requests wait


class ServedModelsReport(msgspec.Struct, kw_only=True):
    """Reply of all routes here.  `keeper` False: one model, which is always loaded."""

    keeper: bool
    keeper_problem: str = ""  # why no model can be loaded or unloaded now
    memory_bytes: int = 0  # for all models together
    models: list[ServedModelReport]


class LoadModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    wait: bool = True  # until the model is loaded, or unloaded


class PinServedModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pinned: bool = True


@dataclass(eq=False)
class ModelRoutes:
    """Handlers.  `switcher` None: a pair of one model."""

    models: ServedModels
    switcher: ModelSwitcher | None
    body_reader: BodyReader
    background: BackgroundTasks

    async def get_models(self, _: web.Request) -> web.Response:
        return json_response(build_models_report(self.models, self.switcher))

    async def load(self, request: web.Request) -> web.Response:
        """Load a model; the reply comes once it is loaded, unless the body says `"wait": false`."""
        switcher, backend = self._find(request)
        return await self._finish(request, switcher.load(backend))

    async def unload(self, request: web.Request) -> web.Response:
        """Unload a model once its requests are done.  409 for a pinned one."""
        switcher, backend = self._find(request)
        switcher.check_unpinned(backend)
        return await self._finish(request, switcher.unload(backend))

    async def pin(self, request: web.Request) -> web.Response:
        """Pin a model, which is loaded then and stays, or unpin it."""
        switcher, backend = self._find(request)
        body = await self._read(request, PinServedModelRequest, "pin of a model")
        try:
            await switcher.pin(backend, body.pinned)
        except KeeperRefusalError as error:
            raise ClientError(error.status, error.body) from error
        except KeeperCallError as error:
            raise service_unavailable(f"The keeper of the models can't be asked: {error}.  Try again soon.") from error
        return json_response(build_models_report(self.models, self.switcher))

    async def _finish(self, request: web.Request, work: Coroutine[Any, Any, None]) -> web.Response:
        """Wait for a load or unload.

        Where the client leaves, what was begun goes on, and a load that waits for memory is withdrawn.
        """
        try:
            body = await self._read(request, LoadModelRequest, "load of a model")
        except BaseException:
            work.close()
            raise
        task = self.background.spawn(_ignore_refusal(work), "load of a model") if not body.wait else None
        if task is None:
            await work
        else:
            await asyncio.sleep(0)  # so that the reply shows that it has begun
        return json_response(build_models_report(self.models, self.switcher))

    async def _read(self, request: web.Request, kind: type[T], name: str) -> T:
        return await self.body_reader.read_message(request, kind, name) if request.can_read_body else kind()

    def _find(self, request: web.Request) -> tuple[ModelSwitcher, Backend]:
        name = request.match_info["name"]
        if self.switcher is None:
            message = (
                "One model is served here, and stays loaded; several are configured as [[models]] (docs/models.md)."
            )
            raise bad_request(message, status=409, code="one_model")
        if (backend := self.models.find(name)) is None:
            names = ", ".join(each.name for each in self.models.backends)
            raise bad_request(
                f"No model {quote_text(name)} is configured; there are {names}.", status=404, code="unknown_model"
            )
        return self.switcher, backend


async def _ignore_refusal(work: Awaitable[None]) -> None:
    """Await work that nobody waits for; the model's stage and reason say why it failed."""
    with suppress(ClientError):
        await work


def build_models_report(models: ServedModels, switcher: ModelSwitcher | None) -> ServedModelsReport:
    reports = [_report(models, backend, switcher) for backend in models.backends]
    if switcher is None:
        return ServedModelsReport(keeper=False, models=reports)
    return ServedModelsReport(
        keeper=True, keeper_problem=switcher.keeper_problem, memory_bytes=switcher.reply.memory_bytes, models=reports
    )


def _report(models: ServedModels, backend: Backend, switcher: ModelSwitcher | None) -> ServedModelReport:
    engine, gate = backend.state.known_status, backend.gate
    report = ServedModelReport(
        name=backend.name,
        default=backend is models.default,
        stage=ModelStage.LOADED if backend.watchdog.is_up else ModelStage.STARTING,
        pinned=True,
        kv_bytes=engine.memory_budget_bytes if engine else 0,
        resident_bytes=engine.resident_bytes if engine and backend.is_usable else 0,
        running=backend.admission.running_count,
        waiting=backend.admission.queued_count + len(gate.waiting),
        last_used_at=gate.last_used_at,
    )
    if switcher is None or backend.model is None:
        return report
    status = switcher.find_status(backend)
    names = ("stage", "pinned", "weight_bytes", "need_bytes", "held_bytes", "kv_bytes", "load_s", "reason")
    refusal = None if status.reason else switcher.find_refusal(backend)
    fields = {name: getattr(status, name) for name in names}
    return msgspec.structs.replace(
        report,
        aliases=list(backend.model.aliases),
        idle_s=backend.model.idle_s,
        wait_reason=gate.wait_reason,
        **fields | ({"reason": decode_error_body(refusal).message} if refusal else {}),
    )
