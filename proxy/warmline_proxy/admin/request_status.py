"""State of one request, for a status bar: GET /warmline/requests/ID for the owner, /v1/requests/ID for its client."""

import asyncio
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from warmline_common.protocol import waits
from warmline_common.protocol.messages import HEADER_REQUEST
from warmline_common.protocol.tokens import namespace
from warmline_proxy.api.responses.history import RESPONSE_PREFIX
from warmline_proxy.auth.principals import Client
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.bodies import json_response
from warmline_proxy.index.index import Index
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request, RequestStatus
from warmline_proxy.store.rows import RequestRecord

QUEUED, LOADING, ENDED = "queued", "loading", "ended"
STATES = {
    RequestStatus.ARRIVING: QUEUED,
    RequestStatus.WAITING: QUEUED,
    RequestStatus.RESTORING: "restoring",
    RequestStatus.PREFILLING: "prefilling",
    RequestStatus.ANSWERING: "decoding",
    RequestStatus.ENDING: ENDED,
    RequestStatus.SAVING: ENDED,
}
_ID_PREFIX = re.compile(rf"\A(chatcmpl-|cmpl-|msg_|{RESPONSE_PREFIX})")  # before the request id in a response id


class PhaseSeconds(msgspec.Struct, kw_only=True):
    """Seconds that a request has been in each phase, the present one included."""

    queued: float
    loading: float  # waiting for its model to be loaded
    restoring: float
    prefilling: float
    decoding: float


class RequestState(msgspec.Struct, kw_only=True):
    """State of a request on its way, or of one that has ended."""

    id: str
    state: str  # "loading" while it waits for its model; else one of STATES
    endpoint: str
    model: str  # that serves it; "" until it is chosen
    client_model: str  # as the client sent it
    client: str  # key name; "" without one
    at: float  # of its arrival, in Unix seconds
    age_s: float  # since then, or until its end
    prompt_tokens: int  # 0 until the prompt is rendered
    cached_tokens: int
    processed_tokens: int  # of the prompt: reused or computed
    generated_tokens: int  # of all choices; while it decodes, pieces that were sent, about one a token
    seconds: PhaseSeconds
    ttft_s: float | None = None  # from the arrival; None until the first token
    expected_s: float | None = None  # from now to the first token; None where it has come, or nothing is planned yet
    queue_position: int | None = None  # 1: next; None where it waits in no queue of the proxy
    source: str = ""  # of the reused tokens; "" until planned
    choices: int = 1  # that have begun
    outcome: str = ""  # "ok", "error" or "cancelled", once it has ended
    error: str = ""


def list_request_ids(name: str) -> tuple[str, ...]:
    """Request ids that a name may mean: itself, or the id within the id of a response."""
    return (name, _ID_PREFIX.sub("", name))


@dataclass(eq=False)
class RequestStateRoutes:
    """Finds the states of requests: in the registry, else in the records of the last ones.  Event loop thread."""

    index: Index
    models: ServedModels
    registry: RequestRegistry

    async def get_request(self, request: web.Request) -> web.Response:
        """State of any client's request, for the owner."""
        return json_response(await self.find_state(request.match_info["name"].rstrip("/"), None))

    async def find_state(self, name: str, client: Client | None) -> RequestState:
        """State of a request by its own id or its response's; `client`: whose, None: anybody's.  Raises ClientError."""
        if request := self.find_running(name, client):
            return build_state(request)
        records = await asyncio.to_thread(self.index.requests)
        if client is not None:
            records = [record for record in records if self._is_clients(record, client)]
        if record := find_record(records, list_request_ids(name)):
            return build_ended_state(record, record.model or self._only_model)
        raise _unknown_request(name)

    def find_running(self, name: str, client: Client | None) -> Request | None:
        """The request on its way with that id, or whose response has it; `client`: whose, None: anybody's."""
        return next(filter(None, (self.registry.find(each, client) for each in list_request_ids(name))), None)

    @property
    def _only_model(self) -> str:
        """Name of the only model, which records don't have; "" where there are several, or it is not known yet."""
        status = None if self.models.has_keeper else self.models.backends[0].state.known_status
        return status.model if status else ""

    def _is_clients(self, record: RequestRecord, client: Client) -> bool:
        """True for a record of this client, not of an earlier key with its name."""
        statuses = (backend.state.known_status for backend in self.models.backends)
        roots = {namespace(status.fingerprint, client.tenant) for status in statuses if status}
        return record.key == client.name and record.root in roots


def find_record(records: Sequence[RequestRecord], ids: Collection[str]) -> RequestRecord | None:
    """The newest record of these ids; else the first one of a request that has one for each choice (ID.0, ID.1 ...)."""
    if record := next((record for record in records if record.id in ids), None):
        return record
    return min((each for each in records if each.id.rpartition(".")[0] in ids), key=lambda each: each.id, default=None)


def build_state(request: Request) -> RequestState:
    """State of a request on its way; of several choices, the first one's phases."""
    branches, log = request.branches or [request], request.log
    first = branches[0]
    plan = first.log.plan
    state, reuse = LOADING if first.model_wait else STATES[request.status], plan.reuse if plan else 0
    processed = first.log.prompt_tokens if first.log.ttft_s else max(first.prefilled_tokens, reuse)
    return RequestState(
        id=log.id,
        state=state,
        endpoint=log.endpoint,
        model=first.model or log.model,
        client_model=log.client_model,
        client=log.key,
        at=log.arrived_at,
        age_s=log.total_s or log.elapsed_s(),
        prompt_tokens=first.log.prompt_tokens,
        cached_tokens=min(reuse, processed),
        processed_tokens=processed,
        generated_tokens=sum(branch.content_chunks for branch in branches),
        seconds=_measure_phases(first),
        ttft_s=first.log.ttft_s or None,
        expected_s=None if state == ENDED else estimate_first_token_s(first),
        queue_position=find_queue_position(first),
        source=plan.source if plan else "",
        choices=len(branches),
        outcome=log.outcome,
        error=log.error,
    )


def _measure_phases(request: Request) -> PhaseSeconds:
    stages = dict.fromkeys(RequestStatus, 0.0) | request.measure_stages()
    loading_s = request.log.measure_load_s(request.model_wait.since if request.model_wait else None)
    return PhaseSeconds(
        queued=max(0.0, stages[RequestStatus.ARRIVING] + stages[RequestStatus.WAITING] - loading_s),
        loading=loading_s,
        restoring=stages[RequestStatus.RESTORING],
        prefilling=stages[RequestStatus.PREFILLING],
        decoding=stages[RequestStatus.ANSWERING],
    )


def estimate_first_token_s(request: Request) -> float | None:
    """Seconds from now; None where the first token has come, or nothing is planned."""
    log, plan = request.log, request.log.plan
    if plan is None or log.ttft_s:
        return None
    if not request.started:
        return max(0.0, plan.expected_ttft_s - log.elapsed_s())
    costs = request.backend.state.costs()
    left_s = costs.estimate_prefill_s(max(request.prefilled_tokens, plan.reuse), log.prompt_tokens - 1)
    return left_s + costs.first_step.estimate_s(log.prompt_tokens)


def find_queue_position(request: Request) -> int | None:
    """Place among those that wait for the same model, or for a place among the running ones."""
    if request.model_wait:
        return list(request.backend.gate.waiting).index(request) + 1
    return request.backend.admission.find_position(request.ticket) if request.ticket else None


def build_ended_state(record: RequestRecord, model: str) -> RequestState:
    """State of a request that is saved, or was not to be."""
    loading_s = record.waits.get(waits.LOAD, 0.0)
    return RequestState(
        id=record.id,
        state=ENDED,
        endpoint=record.endpoint,
        model=model,
        client_model=record.client_model,
        client=record.key,
        at=record.at,
        age_s=record.total_s,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        processed_tokens=record.reached_tokens,
        generated_tokens=record.generated_tokens,
        seconds=PhaseSeconds(
            queued=max(0.0, record.queue_s - loading_s),
            loading=loading_s,
            restoring=record.restore_s,
            prefilling=record.prefill_s,
            decoding=record.decode_s,
        ),
        ttft_s=record.ttft_s or None,
        source=record.source,
        outcome=record.outcome,
        error=record.error,
    )


def _unknown_request(name: str) -> ClientError:
    message = (
        f'No request "{name[:80]}" is on its way or among the last ones that have ended.  The id is that of the '
        f"answer's header {HEADER_REQUEST}, or the name that the client sent in it."
    )
    return bad_request(message, status=404, code="unknown_request")
