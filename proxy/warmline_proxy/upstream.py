"""The backend, as typed calls.  The only module that knows httpx and tenacity.

    UpstreamError
    ├── Unreachable      nobody listens, and nobody did for `wait_s`; nothing was sent
    ├── Broken           the connection broke off, or an answer took too long
    ├── Garbled          an answer that the contract doesn't know
    └── Refused          an HTTP status of 400 or more; `body` is the backend's error object
        ├── Gone         410: the resident, the prompt or the request is no longer there; plan again
        └── RestoreFailed   409 of a restore; `reply` names the file at fault

Errors are translated here, once.  Nothing is sent twice unless sending it twice is harmless.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import httpx
import msgspec
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from warmline_proxy.plan import Plan
from warmline_wire.messages import (
    HEADER_CHECKPOINTS,
    HEADER_KEEP,
    HEADER_PROMPT,
    HEADER_REQUEST,
    HEADER_RESIDENT,
    HEADER_REUSE,
    KeepOrder,
    PromptReply,
    PromptRequest,
    ResidentsReply,
    RestoreRefused,
    RestoreReply,
    RestoreRequest,
    SaveReply,
    SaveRequest,
    Settled,
    Status,
    decode,
    encode,
    message_in,
)

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 120.0  # an engine lets go between two steps, and a step of a very large model takes long
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}

T = TypeVar("T")


class UpstreamError(Exception):
    """The backend didn't do what was asked."""


class Unreachable(UpstreamError):
    """Nobody listens; nothing was sent."""


class Broken(UpstreamError):
    """The connection broke off, or an answer took too long."""


class Garbled(UpstreamError):
    """An answer that the contract doesn't know."""


class Refused(UpstreamError):
    """An HTTP status of 400 or more."""

    def __init__(self, status: int, body: bytes, retry_after: str = "") -> None:
        super().__init__(f"{status}: {message_in(body)}")
        self.status = status
        self.body = body
        self.retry_after = retry_after


class Gone(Refused):
    """410: plan again."""


class RestoreFailed(Refused):
    """409 of a restore."""

    def __init__(self, body: bytes, reply: RestoreRefused) -> None:
        super().__init__(409, body)
        self.reply = reply


class ByteStream:
    """The body of an answer whose headers have come.  Close it, or read it to its end."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers = response.headers.multi_items()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Bytes as they arrive, not decoded.  Raises Broken."""
        with _translated():
            async for data in self._response.aiter_raw():
                yield data

    async def close(self) -> None:
        await self._response.aclose()


class Upstream:
    """One backend.  Every method raises UpstreamError, and nothing else, where the backend fails."""

    def __init__(self, base_url: str, secret: str, connect_timeout_s: float) -> None:
        self._base_url = base_url
        self._authorization = {"Authorization": f"Bearer {secret}"}
        self._connect_timeout_s = connect_timeout_s
        # The bare transport: a client's cookies, redirects and environment cost a third more time a call.
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64), trust_env=False, verify=False
        )

    async def close(self) -> None:
        await self._transport.aclose()

    async def status(self, patient: bool = True) -> Status:
        """`patient=False` asks once, now: for probes."""
        return _decoded(await self._call("GET", "/kv/status", patient=patient, timeout_s=PROBE_TIMEOUT_S), Status)

    async def prompt(self, request: PromptRequest) -> PromptReply:
        """Raises Refused (400) with OpenAI's error for whatever is wrong with the body."""
        return _decoded(await self._call("POST", "/kv/prompts", encode(request), repeatable=True), PromptReply)

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """Raises RestoreFailed where a file is at fault."""
        try:
            return _decoded(await self._call("POST", "/kv/restore", encode(request)), RestoreReply)
        except Refused as error:
            if error.status == 409:
                raise RestoreFailed(error.body, _decoded(error.body, RestoreRefused)) from error
            raise

    async def save(self, request: SaveRequest) -> SaveReply:
        """Returns once all files are durable.  Raises Gone where the resident is no longer there."""
        return _decoded(await self._call("POST", "/kv/save", encode(request), patient=False), SaveReply)

    async def residents(self, ids: bool, patient: bool = True) -> ResidentsReply:
        path = "/kv/residents?ids=1" if ids else "/kv/residents"
        return _decoded(await self._call("GET", path, patient=patient, repeatable=True), ResidentsReply)

    async def drop_resident(self, resident: str) -> None:
        try:
            await self._call("DELETE", f"/kv/residents/{resident}", patient=False)
        except Refused as error:
            if error.status not in (404, 410):
                raise

    async def order_residents(self, drop_first: list[str]) -> None:
        """Whom the backend is to drop first when its memory is short."""
        await self._call("PUT", "/kv/residents/order", encode(KeepOrder(drop_first=drop_first)), patient=False)

    async def cancel(self, request_id: str) -> Settled | None:
        """Returns when the engine has let go: what it now holds, or None where the request is over or unknown."""
        try:
            body = await self._call("DELETE", f"/requests/{request_id}", patient=False, timeout_s=CANCEL_TIMEOUT_S)
        except Refused as error:
            if error.status in (404, 410):
                return None
            raise
        return _decoded(body, Settled)

    async def generate(self, endpoint: str, request_id: str, prompt_id: str, plan: Plan) -> ByteStream:
        """Starts a generation of a rendered prompt: always a stream with usage, and no body, for the backend has it.

        Raises Gone where `plan`'s resident or the prompt is no longer there.
        """
        headers = {HEADER_REQUEST: request_id, HEADER_PROMPT: prompt_id}
        if plan.reuse:
            headers |= {HEADER_RESIDENT: plan.resident, HEADER_REUSE: str(plan.reuse)}
            if plan.keep:
                headers[HEADER_KEEP] = "1"
        if plan.checkpoints:
            headers[HEADER_CHECKPOINTS] = ",".join(map(str, plan.checkpoints))
        request = self._request("POST", PATHS[endpoint], headers)
        try:
            return ByteStream(await self._checked(await self._send(request, patient=True, repeatable=False)))
        except Refused as error:
            if error.status in (409, 410):
                raise Gone(error.status, error.body) from error
            raise

    async def forward(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> ByteStream:
        """Any other call, answered with whatever status the backend gives."""
        request = self._request(method, target, headers, body)
        return ByteStream(await self._send(request, patient=False, repeatable=False))

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        patient: bool = True,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        request = self._request(method, path, headers, body, timeout_s)
        response = await self._checked(await self._send(request, patient=patient, repeatable=repeatable))
        with _translated():
            return await response.aread()

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", timeout_s: float | None = None
    ) -> httpx.Request:
        """Generations, restores and saves take as long as they take; only connecting always has a limit."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S).as_dict()
        return httpx.Request(
            method,
            self._base_url + path,
            headers={**headers, **self._authorization},
            content=body or None,
            extensions={"timeout": timeout},
        )

    async def _send(self, request: httpx.Request, *, patient: bool, repeatable: bool) -> httpx.Response:
        """The answer's head.  A refused connection is tried again: a backend that restarts is soon back."""

        def is_worth_another(error: BaseException) -> bool:
            unsent = isinstance(error, httpx.ConnectError)
            return unsent or (repeatable and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError))

        with _translated():
            try:
                return await self._transport.handle_async_request(request)
            except httpx.TransportError as error:
                if not patient or not is_worth_another(error):
                    raise
            retrying = AsyncRetrying(
                retry=retry_if_exception(is_worth_another),
                wait=wait_exponential(multiplier=0.05, max=0.5),
                stop=stop_after_delay(self._connect_timeout_s),
                reraise=True,
            )
            return await retrying(self._transport.handle_async_request, request)

    async def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code < 400:
            return response
        with _translated():
            body = await response.aread()
        kind = Gone if response.status_code == 410 else Refused
        raise kind(response.status_code, body, response.headers.get("Retry-After", ""))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unreachable(f"the backend is not reachable: {error}") from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise Broken(f"the backend broke off: {error or type(error).__name__}") from error


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body, kind)
    except msgspec.DecodeError as error:
        raise Garbled(f"the backend's {kind.__name__} is not readable: {error}") from error
