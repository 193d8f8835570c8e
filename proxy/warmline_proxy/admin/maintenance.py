"""Owner's maintenance of the store: pin, gc, repair, replay, import."""

import asyncio
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from warmline_proxy.archive import importer
from warmline_proxy.archive.reader import open_archive
from warmline_proxy.archive.tar import ArchiveError, Progress
from warmline_proxy.audit.replay import SessionReplayer
from warmline_proxy.auth.key_store import KeyStoreError
from warmline_proxy.auth.owners import load_key_tenants
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import BodyReader, json_response
from warmline_proxy.index.index import DiskBudgetError, Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import PinLimitError, UnknownSessionError, pin_session
from warmline_proxy.store.errors import wrap_error
from warmline_proxy.store.rows import GcRequest, PinRequest, ReplayRequest
from warmline_proxy.upstream.client import UpstreamError

log = logging.getLogger(__name__)


class _ImportCancelledError(Exception):
    """The importing client has disconnected."""


@dataclass(eq=False)
class MaintenanceRoutes:
    """Handlers of maintenance commands; saves and restores continue meanwhile, and their files are left alone."""

    index: Index
    models: ServedModels
    replayer: SessionReplayer
    config: ProxyConfig
    body_reader: BodyReader

    async def pin(self, request: web.Request) -> web.Response:
        """Pin or unpin a session.  404 for an unknown session, 409 above the budget."""
        pin_request = await self.body_reader.read_message(request, PinRequest, "pin")
        try:
            return json_response(await asyncio.to_thread(pin_session, self.index, pin_request))
        except UnknownSessionError as error:
            raise bad_request(str(error), status=404, code="not_found") from error
        except PinLimitError as error:
            raise bad_request(str(error), status=409, code="too_much_pinned") from error
        except ValueError as error:
            raise bad_request(f"Not a pin: {error}") from error

    async def gc(self, request: web.Request) -> web.Response:
        gc_request = await self.body_reader.read_message(request, GcRequest, "gc")
        try:
            return json_response(await asyncio.to_thread(collect_garbage, self.index, gc_request, is_saving=True))
        except ValueError as error:
            raise bad_request(f"Not a gc: {error}") from error
        except OSError as error:
            raise wrap_error("can't be tidied", error) from error

    async def repair(self, _: web.Request) -> web.Response:
        """Check and repair all files."""
        try:
            reply = await asyncio.to_thread(repair, self.index, deep=True, is_saving=True)
        except OSError as error:
            raise wrap_error("can't be repaired", error) from error
        for finding in reply.did:
            log.warning("repair: %s %s: %s", finding.what, finding.id, finding.detail)
        return json_response(reply)

    async def replay(self, request: web.Request) -> web.Response:
        """Replay a session's turns and answer when all are computed; a disconnect cancels it."""
        replay_request = await self.body_reader.read_message(request, ReplayRequest, "replay")
        try:
            return json_response(await self.replayer.replay(replay_request))
        except ValueError as error:
            raise bad_request(f"Not a replay: {error}") from error

    async def import_archive(self, request: web.Request) -> web.Response:
        """Import an archive and answer when all of it is stored.  A disconnect cancels it and removes its files."""
        import_request = await self.body_reader.read_message(request, importer.ImportRequest, "valid import")
        if not Path(import_request.path).is_absolute():
            raise bad_request(f"path must be absolute, not {import_request.path[:200]!r}.", param="path")
        known_models, cancel_event = await self._find_known_models(), threading.Event()

        def progress(done: int, total: int) -> None:
            if cancel_event.is_set():
                raise _ImportCancelledError

        try:
            return json_response(await asyncio.to_thread(self._run_import, import_request, known_models, progress))
        except asyncio.CancelledError:
            cancel_event.set()
            raise
        except KeyStoreError as error:
            raise bad_request(str(error), param="key") from error
        except ArchiveError as error:
            raise bad_request(str(error), code="bad_archive") from error
        except DiskBudgetError as error:
            raise bad_request(f"there is no room for it: {error}", status=409, code="no_room") from error
        except OSError as error:
            raise wrap_error("can't be written", error) from error

    async def _find_known_models(self) -> importer.KnownModels:
        """The served models; while one's fingerprint is not known, also all models with stored segments."""
        names: dict[str, str] = {}  # by fingerprint
        for backend in self.models.backends:
            with suppress(UpstreamError):
                status = await backend.state.status()
                names.setdefault(status.fingerprint, status.model)
        names.pop("", None)
        if not names:
            return await asyncio.to_thread(importer.find_known_models, self.index)
        models = ", ".join(f"{name}, {each[: importer.FINGERPRINT_DIGITS]}" for each, name in names.items())
        description = f"the model{'s' * (len(names) > 1)} served here {'are' if len(names) > 1 else 'is'} {models}"
        if len(names) == len(self.models.backends):
            return importer.KnownModels(fingerprints=list(names), description=description)
        stored = await asyncio.to_thread(importer.find_known_models, self.index)
        return importer.KnownModels(fingerprints=[*names, *stored.fingerprints], description=description)

    def _run_import(
        self, request: importer.ImportRequest, known_models: importer.KnownModels, progress: Progress
    ) -> importer.ImportReply:
        config = self.config
        key_tenants = load_key_tenants(config.home, client_key=config.client_key, share_cache=config.share_cache)
        tenant, anyway = key_tenants.find_tenant(request.key), request.anyway
        with open_archive(Path(request.path)) as archive:
            return importer.import_archive(self.index, archive, tenant, known_models, anyway=anyway, progress=progress)
