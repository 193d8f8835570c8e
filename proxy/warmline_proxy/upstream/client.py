"""The backend, as typed calls.  The only module that knows httpx and tenacity.

    UpstreamError
    ├── Unreachable      nobody listens, or whoever does is still starting or about to stop; nothing was done
    ├── Broken           the connection broke off
    │   └── TimedOut     an answer took longer than its call allows
    ├── Discarded        a step failed at the backend, and the request with it, though it is not to blame
    ├── Leaderless       the request that this one followed ended too soon; plan again
    ├── Garbled          an answer that the contract doesn't know
    └── Refused          an HTTP status of 400 or more; `body` is the backend's error object
        ├── NotStored    507 of a save: the disk; `code` names the system's error
        ├── Gone         410: the resident, the prompt or the request is no longer there; plan again
        └── RestoreFailed   409 of a restore; `reply` names the file at fault

Errors are translated here, once.  Nothing is sent twice unless sending it twice is harmless; a whole request is
dispatched again by `dispatching`, on whose word the caller goes.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import httpx
import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from warmline_common.logging import current_request_id
from warmline_common.process.redaction import redact
from warmline_common.protocol.messages import (
    HEADER_BACKGROUND,
    HEADER_CHECKPOINTS,
    HEADER_FOLLOW,
    HEADER_KEEP,
    HEADER_PROMPT,
    HEADER_REQUEST,
    HEADER_RESIDENT,
    HEADER_REUSE,
    HEADER_ROOT,
    BackendStatus,
    ClearCacheRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    EvictionOrder,
    GenerationResult,
    HealthReply,
    PromptReply,
    PromptRequest,
    ResidentsReply,
    RestoreRefusal,
    RestoreReply,
    RestoreRequest,
    SaveReply,
    SaveRequest,
    decode,
    encode,
    parse_error_message,
    redact_error_message,
)
from warmline_proxy.planner import RequestPlan

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 4.0  # it may compute a token
LIST_TIMEOUT_S = 30.0  # token ids of all residents may be megabytes
DISPATCHES_MAX = 5
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}

T = TypeVar("T")


class UpstreamError(Exception):
    """The backend didn't do what was asked."""


class UpstreamUnreachableError(UpstreamError):
    """Nobody listens, or whoever does can't serve now; nothing was done."""


class UpstreamConnectionError(UpstreamError):
    """The connection broke off."""


class UpstreamTimeoutError(UpstreamConnectionError):
    """An answer took longer than its call allows."""


class StepFailedError(UpstreamError):
    """A step failed, and all in its batch is lost."""


class LeaderLostError(UpstreamError):
    """Whom this request followed ended too soon."""


class InvalidReplyError(UpstreamError):
    """An answer that the contract doesn't know."""


class UpstreamStatusError(UpstreamError):
    """An HTTP status of 400 or more."""

    def __init__(self, status: int, body: bytes, retry_after: str = "") -> None:
        super().__init__(f"{status}: {redact_error_message(body)}")
        self.status = status
        self.body = body
        self.retry_after = retry_after


class UpstreamGoneError(UpstreamStatusError):
    """410: plan again."""


class InsufficientStorageError(UpstreamStatusError):
    """507 of a save; `code` is the name of the system's error, as "ENOSPC"."""

    @property
    def code(self) -> str:
        try:
            return decode(self.body, ErrorReply).error.code or "EIO"
        except msgspec.DecodeError:
            return "EIO"


class RestoreFailedError(UpstreamStatusError):
    """409 of a restore."""

    def __init__(self, body: bytes, reply: RestoreRefusal) -> None:
        super().__init__(409, body)
        self.reply = reply


class ByteStream:
    """The body of an answer whose headers have come.  Close it, or read it to its end."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def chunks(self) -> AsyncIterator[bytes]:
        """Bytes as they arrive, not decoded.  Raises Broken."""
        with _translate_errors():
            async for data in self._response.aiter_raw():
                yield data

    async def close(self) -> None:
        await self._response.aclose()


def retry_dispatch() -> AsyncRetrying:
    """Has a request that said nothing yet sent again where the backend was lost under it; a bounded number of times."""
    return AsyncRetrying(
        retry=retry_if_exception_type((UpstreamUnreachableError, UpstreamConnectionError, StepFailedError)),
        stop=stop_after_attempt(DISPATCHES_MAX),
        wait=wait_exponential(multiplier=0.1, max=2.0),
        reraise=True,
    )


class _ReadyReply(msgspec.Struct):
    """GET /ready."""

    ready: bool
    reason: str = ""


class Upstream:
    """One backend.  Every method raises UpstreamError, and nothing else, where the backend fails."""

    def __init__(self, base_url: str, secret: str) -> None:
        self._base_url = base_url
        self._authorization = {"Authorization": f"Bearer {secret}"}
        # The bare transport: a client's cookies, redirects and environment cost a third more time a call.
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64), trust_env=False, verify=False
        )

    async def close(self) -> None:
        await self._transport.aclose()

    async def fetch_pulse(self, timeout_s: float) -> HealthReply:
        """Whether the engine moves.  Raises Unreachable where no process listens, TimedOut where it doesn't answer."""
        return _decode_reply(await self._call("GET", "/health", timeout_s=timeout_s), HealthReply)

    async def check_ready(self) -> None:
        """Returns where a request would be computed now.  Raises Unreachable with the reason where not."""
        response = await self._send(self._request("GET", "/ready", {}, timeout_s=READY_TIMEOUT_S))
        with _translate_errors():
            body = await response.aread()
        if not (verdict := _decode_reply(body, _ReadyReply)).ready:
            raise UpstreamUnreachableError(verdict.reason)

    async def fetch_status(self) -> BackendStatus:
        return _decode_reply(
            await self._call("GET", "/kv/status", timeout_s=PROBE_TIMEOUT_S, repeatable=True), BackendStatus
        )

    async def render_prompt(self, request: PromptRequest, timeout_s: float | None = None) -> PromptReply:
        """Raises Refused (400) with OpenAI's error for whatever is wrong with the body."""
        body = await self._call("POST", "/kv/prompts", encode(request), repeatable=True, timeout_s=timeout_s)
        return _decode_reply(body, PromptReply)

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """Raises RestoreFailed where a file is at fault."""
        try:
            return _decode_reply(await self._call("POST", "/kv/restore", encode(request)), RestoreReply)
        except UpstreamStatusError as error:
            if error.status == 409:
                raise RestoreFailedError(error.body, _decode_reply(error.body, RestoreRefusal)) from error
            raise

    async def save(self, request: SaveRequest, timeout_s: float) -> SaveReply:
        """Returns once all files are durable.  Raises Gone where the resident is no longer there, TimedOut."""
        return _decode_reply(await self._call("POST", "/kv/save", encode(request), timeout_s=timeout_s), SaveReply)

    async def detokenize(self, sequences: Sequence[bytes]) -> list[str]:
        """What packed tokens of the model that it serves say, one text a sequence."""
        body = encode(DetokenizeRequest(sequences=list(sequences)))
        reply = await self._call("POST", "/kv/texts", body, repeatable=True, timeout_s=PROBE_TIMEOUT_S)
        if len(texts := _decode_reply(reply, DetokenizeReply).texts) != len(sequences):
            raise InvalidReplyError(f"the backend gave {len(texts)} texts for {len(sequences)} sequences")
        return texts

    async def list_residents(self, ids: bool) -> ResidentsReply:
        path = "/kv/residents?ids=1" if ids else "/kv/residents"
        return _decode_reply(await self._call("GET", path, repeatable=True, timeout_s=LIST_TIMEOUT_S), ResidentsReply)

    async def delete_resident(self, resident: str) -> None:
        try:
            await self._call("DELETE", f"/kv/residents/{resident}")
        except UpstreamStatusError as error:
            if error.status not in (404, 410):
                raise

    async def purge_memory(self, keep: Sequence[str] = ()) -> None:
        """Have it drop all that it holds of conversations in memory, but for what is computed, and for these residents,
        or what these requests have left.
        """
        await self._call("POST", "/kv/forget", encode(ClearCacheRequest(keep=list(keep))))

    async def order_residents(self, drop_first: list[str]) -> None:
        """Whom the backend is to drop first when its memory is short."""
        await self._call("PUT", "/kv/residents/order", encode(EvictionOrder(drop_first=drop_first)))

    async def cancel(self, request_id: str, timeout_s: float) -> GenerationResult | None:
        """Returns when the engine has let go: what it now holds, or None where the request is over or unknown.

        Raises TimedOut where it hasn't within `timeout_s`.
        """
        return await self._delete_request(f"/requests/{request_id}", timeout_s)

    async def finish_prefill(self, request_id: str, timeout_s: float) -> GenerationResult | None:
        """Nobody waits for the request any more.  None where it goes on alone, or is over; else as `cancel`."""
        return await self._delete_request(f"/requests/{request_id}?finish=prefill", timeout_s)

    async def _delete_request(self, path: str, timeout_s: float) -> GenerationResult | None:
        try:
            body = await self._call("DELETE", path, timeout_s=timeout_s)
        except UpstreamStatusError as error:
            if error.status in (404, 410):
                return None
            raise
        return _decode_reply(body, GenerationResult) if body != b"{}" else None

    async def generate(
        self,
        endpoint: str,
        request_id: str,
        prompt_id: str,
        plan: RequestPlan,
        *,
        root: bytes,
        background: bool = False,
    ) -> ByteStream:
        """Starts a generation of a rendered prompt: always a stream with usage, and no body, for the backend has it.

        `root` says whose it is: the backend has it start from nobody else's rows, and what it leaves bears it.
        In the `background` it is computed while nobody else wants the engine, and nothing of it is kept.

        Raises Gone where `plan`'s resident, its leader or the prompt is no longer there.
        """
        headers = {HEADER_REQUEST: request_id, HEADER_PROMPT: prompt_id, HEADER_ROOT: root.hex()}
        if plan.leader_id:
            headers |= {HEADER_FOLLOW: plan.leader_id, HEADER_REUSE: str(plan.reuse)}
        elif plan.reuse:
            headers |= {HEADER_RESIDENT: plan.resident, HEADER_REUSE: str(plan.reuse)}
            if plan.copy_resident:
                headers[HEADER_KEEP] = "1"
        if plan.checkpoint_positions:
            headers[HEADER_CHECKPOINTS] = ",".join(map(str, plan.checkpoint_positions))
        if background:
            headers[HEADER_BACKGROUND] = "1"
        request = self._request("POST", PATHS[endpoint], headers)
        try:
            return ByteStream(await self._check_status(await self._send(request)))
        except UpstreamStatusError as error:
            if error.status in (409, 410):
                raise UpstreamGoneError(error.status, error.body) from error
            raise

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        request = self._request(method, path, headers, body, timeout_s)
        response = await self._check_status(await self._send(request, repeatable))
        with _translate_errors():
            return await response.aread()

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", timeout_s: float | None = None
    ) -> httpx.Request:
        """Generations, restores and saves take as long as they take; only connecting always has a limit."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S).as_dict()
        everything = {**headers, **self._authorization}
        if request_id := current_request_id():  # which the backend's log has then, too
            everything.setdefault(HEADER_REQUEST, request_id)
        return httpx.Request(
            method,
            self._base_url + path,
            headers=[(name.encode(), value.encode()) for name, value in everything.items()],
            content=body or None,
            extensions={"timeout": timeout},
        )

    async def _send(self, request: httpx.Request, repeatable: bool = False) -> httpx.Response:
        """The answer's head.  A kept connection may have been closed in this moment: then once more, on a new one."""
        with _translate_errors():
            try:
                return await self._transport.handle_async_request(request)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if not repeatable:
                    raise
            return await self._transport.handle_async_request(request)

    async def _check_status(self, response: httpx.Response) -> httpx.Response:
        if response.status_code < 400:
            return response
        with _translate_errors():
            body = await response.aread()
        if response.status_code == 503:
            raise UpstreamUnreachableError(f"the backend is not ready: {parse_error_message(body)}")
        kind = {410: UpstreamGoneError, 507: InsufficientStorageError}.get(response.status_code, UpstreamStatusError)
        raise kind(response.status_code, body, response.headers.get("Retry-After", ""))


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise UpstreamUnreachableError("the backend is not reachable") from error
    except httpx.TimeoutException as error:
        raise UpstreamTimeoutError("the backend did not answer in time") from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise UpstreamConnectionError("the backend broke off") from error


def _decode_reply(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body, kind)
    except msgspec.DecodeError as error:
        raise InvalidReplyError(f"the backend's {kind.__name__} is not readable: {redact(str(error))}") from error
