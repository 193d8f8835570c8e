"""The backend as typed calls, on the connections of `transport`.

    UpstreamError
    ├── UpstreamUnreachableError      no process listens, or it is starting or stopping; nothing was done
    ├── UpstreamConnectionError       the connection broke off
    │   └── UpstreamTimeoutError      an answer took longer than its call allows
    ├── StepFailedError               a step of the engine failed, and all requests in its batch with it
    ├── LeaderLostError               the request that this one followed ended too soon; plan again
    ├── InvalidReplyError             an answer that doesn't match the protocol
    └── UpstreamStatusError           an HTTP status of 400 or more; `body` is the backend's error object
        ├── InsufficientStorageError  507 of a save: the disk; `code` is the system's error name
        ├── UpstreamGoneError         410: the resident, the prompt or the request is gone; plan again
        └── RestoreFailedError        409 of a restore; `reply` names the file at fault

Errors are translated here, once, and for clients by `translate_upstream_error`.  Only calls that are harmless to repeat
are sent twice; whole requests are dispatched again by the pipeline, with `retry_dispatch`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import aiohttp
import httpx
import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from warmline_common.logging import current_request_id
from warmline_common.process.redaction import redact
from warmline_common.protocol import messages
from warmline_common.protocol.messages import decode, encode
from warmline_proxy import errors
from warmline_proxy.errors import ClientError
from warmline_proxy.planner import RequestPlan
from warmline_proxy.upstream.transport import (
    CONNECTION_LOST_ERRORS,
    ControlTransport,
    RequestTransport,
    Transport,
    UpstreamRequest,
    UpstreamResponse,
)

PROBE_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 4.0  # it may compute a token
LIST_TIMEOUT_S = 30.0  # token ids of all residents may be megabytes
DISPATCHES_MAX = 5
RETRY_WAIT_S = 0.1  # the first; each later one is twice as long
CONTROL_METHODS = ("GET", "DELETE")  # states, listings and cancels: no request waits long for them
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}

T = TypeVar("T")
P = ParamSpec("P")


class UpstreamError(Exception):
    """Failure of a call to the backend."""


class UpstreamUnreachableError(UpstreamError):
    """No process listens, or it can't serve now; nothing was done."""


class UpstreamConnectionError(UpstreamError):
    """Connection that broke off."""


class UpstreamTimeoutError(UpstreamConnectionError):
    """Answer that took longer than its call allows."""


class StepFailedError(UpstreamError):
    """Failure of an engine step, which ends all requests in its batch."""


class LeaderLostError(UpstreamError):
    """End of the leading request before its prefix could be shared."""


class InvalidReplyError(UpstreamError):
    """Answer that doesn't match the protocol."""


class UpstreamStatusError(UpstreamError):
    """HTTP status of 400 or more."""

    def __init__(self, status: int, body: bytes, retry_after: str = "") -> None:
        super().__init__(f"{status}: {messages.redact_error_message(body)}")
        self.status, self.body, self.retry_after = status, body, retry_after


class UpstreamGoneError(UpstreamStatusError):
    """Status 410: plan again."""


class InsufficientStorageError(UpstreamStatusError):
    """Status 507 of a save."""

    @property
    def code(self) -> str:
        """Name of the system's error, such as "ENOSPC"."""
        try:
            return decode(self.body, messages.ErrorReply).error.code or "EIO"
        except msgspec.DecodeError:
            return "EIO"


class RestoreFailedError(UpstreamStatusError):
    """Status 409 of a restore."""

    def __init__(self, body: bytes, reply: messages.RestoreRefusal) -> None:
        super().__init__(409, body)
        self.reply = reply


BACKEND_LOST_ERRORS = (UpstreamUnreachableError, UpstreamConnectionError)
RETRIED_ERRORS = (*BACKEND_LOST_ERRORS, StepFailedError)


class ByteStream:
    """Body of an answer whose headers have come.  Close it, or read it to its end."""

    def __init__(self, response: UpstreamResponse) -> None:
        self._response = response

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield bytes as they arrive, not decoded.  Raises UpstreamConnectionError."""
        with _translate_errors():
            async for data in self._response.iterate():
                yield data

    async def close(self) -> None:
        await self._response.close()


async def retry_dispatch(dispatch: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Dispatch a request, again where the backend is lost and nothing was sent yet, at most DISPATCHES_MAX times."""
    try:
        return await dispatch(*args, **kwargs)  # most succeed at once, and need nothing of what follows
    except RETRIED_ERRORS:
        await asyncio.sleep(RETRY_WAIT_S)
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(RETRIED_ERRORS),
        stop=stop_after_attempt(DISPATCHES_MAX - 1),
        wait=wait_exponential(multiplier=2 * RETRY_WAIT_S, max=2.0),
        reraise=True,
    )
    await retrying(dispatch, *args, **kwargs)


class _ReadyReply(msgspec.Struct):
    """GET /ready."""

    ready: bool
    reason: str = ""


class Upstream:
    """Client of one backend.  Methods raise UpstreamError and nothing else; event loop thread."""

    def __init__(self, base_url: str, secret: str) -> None:
        self.base_url = base_url  # "" while there is no process
        self._authorization = {"Authorization": f"Bearer {secret}"}
        self._transport, self._control_transport = RequestTransport(), ControlTransport()

    @property
    def has_address(self) -> bool:
        return bool(self.base_url)

    async def close(self) -> None:
        await self._transport.close()
        await self._control_transport.close()

    async def fetch_pulse(self, timeout_s: float) -> messages.HealthReply:
        """Fetch the engine's step counter.  Raises UpstreamUnreachableError, UpstreamTimeoutError."""
        return await self._fetch(messages.HealthReply, "/health", timeout_s=timeout_s)

    async def check_ready(self) -> None:
        """Raise UpstreamUnreachableError with the reason unless a request would be computed now."""
        response = await self._send(self._request("GET", "/ready", {}, timeout_s=READY_TIMEOUT_S))
        with _translate_errors():
            body = await response.read()
        if not (reply := _decode_reply(body, _ReadyReply)).ready:
            raise UpstreamUnreachableError(reply.reason)

    async def fetch_status(self) -> messages.BackendStatus:
        return await self._fetch(messages.BackendStatus, "/kv/status", timeout_s=PROBE_TIMEOUT_S, repeatable=True)

    async def render_prompt(self, body: messages.PromptRequest, timeout_s: float | None = None) -> messages.PromptReply:
        """Render and tokenize a body.  Raises UpstreamStatusError (400) with OpenAI's error for an invalid one."""
        return await self._fetch(messages.PromptReply, "/kv/prompts", body, timeout_s=timeout_s, repeatable=True)

    async def restore(self, request: messages.RestoreRequest) -> messages.RestoreReply:
        """Restore a chain of segments into memory.  Raises RestoreFailedError where a file is at fault."""
        try:
            return await self._fetch(messages.RestoreReply, "/kv/restore", request)
        except UpstreamStatusError as error:
            if error.status == 409:
                raise RestoreFailedError(error.body, _decode_reply(error.body, messages.RestoreRefusal)) from error
            raise

    async def save(self, request: messages.SaveRequest) -> messages.SaveReply:
        """Save a resident; return once all files are durable.  Raises UpstreamGoneError, InsufficientStorageError."""
        return await self._fetch(messages.SaveReply, "/kv/save", request)

    async def detokenize(self, sequences: Sequence[bytes]) -> list[str]:
        """Decode packed tokens of the served model, one text a sequence."""
        kind, request = messages.DetokenizeReply, messages.DetokenizeRequest(sequences=list(sequences))
        reply = await self._fetch(kind, "/kv/texts", request, timeout_s=PROBE_TIMEOUT_S, repeatable=True)
        if len(reply.texts) != len(sequences):
            raise InvalidReplyError(f"the backend gave {len(reply.texts)} texts for {len(sequences)} sequences")
        return reply.texts

    async def list_residents(self, since: int = 0, ids: Sequence[str] = ()) -> messages.ResidentsReply:
        """List the residents in memory, what has changed `since` a revision, or those of these `ids` with tokens."""
        query = f"?ids={','.join(ids)}" if ids else f"?since={since}"
        kind = messages.ResidentsReply
        return await self._fetch(kind, f"/kv/residents{query}", timeout_s=LIST_TIMEOUT_S, repeatable=True)

    async def delete_resident(self, resident: str) -> None:
        await self._delete(f"/kv/residents/{resident}")

    async def purge_memory(self, keep: Sequence[str] = ()) -> None:
        """Drop all KV of conversations in memory, except running requests and the residents or requests in `keep`."""
        await self._call("POST", "/kv/forget", messages.ClearCacheRequest(keep=list(keep)))

    async def extend_eviction_order(self, drop_first: list[str]) -> None:
        """Add residents to those that the backend drops first when its memory is short; their leases end."""
        await self._call("PUT", "/kv/residents/order", messages.EvictionOrder(drop_first=drop_first, extends=True))

    async def cancel(self, request_id: str, timeout_s: float) -> messages.GenerationResult | None:
        """Cancel a request; return the result when its step has ended, or None where it is over or unknown."""
        return await self._cancel(f"/requests/{request_id}", timeout_s)

    async def finish_prefill(self, request_id: str, timeout_s: float) -> messages.GenerationResult | None:
        """Let a request without a client end after its prefill; None where it goes on or is over; else as `cancel`."""
        return await self._cancel(f"/requests/{request_id}?finish=prefill", timeout_s)

    async def _cancel(self, path: str, timeout_s: float) -> messages.GenerationResult | None:
        body = await self._delete(path, timeout_s)
        return _decode_reply(body, messages.GenerationResult) if body != b"{}" else None

    async def _delete(self, path: str, timeout_s: float | None = None) -> bytes:
        """Delete something; b"{}" where it is gone already."""
        try:
            return await self._call("DELETE", path, timeout_s=timeout_s)
        except UpstreamStatusError as error:
            if error.status not in (404, 410):
                raise
            return b"{}"

    async def generate(
        self, endpoint: str, request_id: str, prompt_id: str, plan: RequestPlan, root: bytes, background: str = ""
    ) -> ByteStream:
        """Start a generation of a rendered prompt: always a stream with usage; the backend has the body already.

        `root`: namespace of the rows that it may start from and leaves.  With `background` it is computed while no
        other request wants the engine, and none of its KV is kept (BACKGROUND_DROP), or all (BACKGROUND_KEEP).  Raises
        UpstreamGoneError where the plan's resident, its leader or the prompt is no longer there.
        """
        is_resident = not plan.leader_id and plan.reuse > 0
        headers = {
            messages.HEADER_REQUEST: request_id,
            messages.HEADER_PROMPT: prompt_id,
            messages.HEADER_ROOT: root.hex(),
            messages.HEADER_FOLLOW: plan.leader_id,
            messages.HEADER_RESIDENT: plan.resident if is_resident else "",
            messages.HEADER_KEEP: "1" if is_resident and plan.copy_resident else "",
            messages.HEADER_REUSE: str(plan.reuse) if plan.leader_id or plan.reuse else "",
            messages.HEADER_CHECKPOINTS: ",".join(map(str, plan.checkpoint_positions)),
            messages.HEADER_BACKGROUND: background,
        }
        given = {name: value for name, value in headers.items() if value}
        try:
            return ByteStream(await self._check_status(await self._send(self._request("POST", PATHS[endpoint], given))))
        except UpstreamStatusError as error:
            if error.status in (409, 410):
                raise UpstreamGoneError(error.status, error.body) from error
            raise

    async def _fetch(
        self, kind: type[T], path: str, message: object = None, timeout_s: float | None = None, repeatable: bool = False
    ) -> T:
        method = "GET" if message is None else "POST"
        return _decode_reply(await self._call(method, path, message, timeout_s, repeatable), kind)

    async def _call(
        self, method: str, path: str, message: object = None, timeout_s: float | None = None, repeatable: bool = False
    ) -> bytes:
        body = b"" if message is None else encode(message)
        headers = {"Content-Type": "application/json"} if body else {}
        request = self._request(method, path, headers, body, timeout_s)
        response = await self._check_status(await self._send(request, repeatable))
        with _translate_errors():
            return await response.read()

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", timeout_s: float | None = None
    ) -> UpstreamRequest:
        """Build a request.  Connecting always has a time limit; generations, restores and saves have no other."""
        everything = {**headers, **self._authorization}
        if request_id := current_request_id():  # for the backend's log
            everything.setdefault(messages.HEADER_REQUEST, request_id)
        return UpstreamRequest(method, self.base_url + path, everything, body, timeout_s)

    async def _send(self, request: UpstreamRequest, repeatable: bool = False) -> UpstreamResponse:
        """Send a request and receive the answer's head; once more if a kept connection was just being closed."""
        if not self.base_url:
            raise UpstreamUnreachableError("the model is not loaded")
        is_control = request.method in CONTROL_METHODS
        transport: Transport = self._control_transport if is_control else self._transport
        with _translate_errors():
            try:
                return await transport.send(request)
            except CONNECTION_LOST_ERRORS as error:
                if not repeatable or isinstance(error, aiohttp.ClientConnectorError):
                    raise
            return await transport.send(request)

    async def _check_status(self, response: UpstreamResponse) -> UpstreamResponse:
        if response.status < 400:
            return response
        with _translate_errors():
            body = await response.read()
        if response.status == 503:
            raise UpstreamUnreachableError(f"the backend is not ready: {messages.parse_error_message(body)}")
        kind = {410: UpstreamGoneError, 507: InsufficientStorageError}.get(response.status, UpstreamStatusError)
        raise kind(response.status, body, response.find_header("Retry-After"))


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, httpx.ConnectError) as error:
        raise UpstreamUnreachableError("the backend is not reachable") from error
    except (TimeoutError, httpx.TimeoutException) as error:
        raise UpstreamTimeoutError("the backend did not answer in time") from error
    except (aiohttp.ClientError, httpx.HTTPError, httpx.StreamError) as error:
        raise UpstreamConnectionError("the backend broke off") from error


def _decode_reply(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body, kind)
    except msgspec.DecodeError as error:
        raise InvalidReplyError(f"the backend's {kind.__name__} is not readable: {redact(str(error))}") from error


def translate_upstream_error(error: ClientError | UpstreamError) -> ClientError:
    """Error for the client from a failure of the backend; the backend's own refusal of a request is passed on."""
    if isinstance(error, ClientError):
        return error
    if isinstance(error, UpstreamUnreachableError):
        return errors.service_unavailable(f"The backend can't serve now: {error}.  Try again soon.")
    if not isinstance(error, UpstreamStatusError):
        return errors.bad_gateway(f"Computing the answer failed: {error}.")
    if error.status == errors.UNAUTHORIZED:  # they disagree about their secret; that is not the client's key
        return errors.bad_gateway("The backend refused the proxy: do both use one home?")
    retry_after_s = int(error.retry_after) if error.retry_after.isascii() and error.retry_after.isdigit() else None
    if error.status in (429, 503) and retry_after_s is None:
        retry_after_s = errors.RETRY_AFTER_S
    is_object = error.body.lstrip().startswith(b"{")
    body = error.body if is_object else errors.encode_error_body(str(error), "server_error")
    return ClientError(error.status, body, retry_after_s)
