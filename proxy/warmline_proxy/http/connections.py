"""Client connections: their number, and their timeouts for sending and reading.

aiohttp parses and answers, but accepts any number of sockets, waits an hour for a head that comes byte by byte, and
forever for a client that reads nothing.  Here each accepted socket is a `Connection`: aiohttp's protocol with a known
phase.  `Connections` admits or refuses sockets and ends those that time out; `warmline_proxy.listener` accepts them.
Event loop thread.
"""

import asyncio
import logging
import socket
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from warmline_common.logging import request_context
from warmline_common.process.redaction import redact_path
from warmline_proxy.errors import RETRY_AFTER_S, ClientError, bad_request, encode_error_body
from warmline_proxy.http.bodies import SERVER_HEADERS, release_body
from warmline_proxy.http.request_head import HEAD_LINE_BYTES_MAX, HEADERS_COUNT_MAX, translate_parser_error
from warmline_proxy.http.request_id import build_id_headers, get_request_id
from warmline_proxy.request_log import new_request_id

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 75.0  # between requests
LINGER_S = 10.0  # for a client to read its last response before a reset
SHUTDOWN_GRACE_S = 0.5  # for handlers after the drain; aiohttp waits it twice
SWEEP_INTERVAL_MAX_S = 1.0  # shorter for short timeouts
SEND_BUFFER_BYTES = 64 * 1024  # small, so that a slow reader's progress shows
REFUSALS_COUNT_MAX = 64  # refused connections with an answer under way; half of `count_max` where that is less
FIRST_BYTE_S = 0.25  # for a new connection's first byte, before it makes way for others
READ_BUFFER_BYTES = 64 * 1024  # of a body that its reader has not taken; the kernel keeps more
PIPELINED_BYTES_MAX = 64 * 1024  # of requests behind the one that is being answered
LOG_INTERVAL_S = 60.0
NEVER_S = 365 * 86_400.0
# A vanished peer is detected after 30 + 6 x 10 seconds.  TCP_USER_TIMEOUT would also end slow readers, which
# `send_timeout_s` limits.
KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_COUNT = 6
if sys.platform == "darwin":
    KEEPALIVE_IDLE_OPTION = socket.TCP_KEEPALIVE
else:
    KEEPALIVE_IDLE_OPTION = socket.TCP_KEEPIDLE


class ConnectionPhase(Enum):
    """Phase of a connection."""

    IDLE = "between requests"
    HEAD = "in a request's head"
    BUSY = "in a request that is being answered"
    CLOSING = "answered for the last time"


class Connection(web.RequestHandler):
    """One client connection.  aiohttp handles HTTP; `check_limits`, called periodically, applies timeouts."""

    def __init__(self, connections: "Connections", server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp's way to disable it
            tcp_keepalive=False,  # `tune_socket` sets it, with shorter intervals
            keepalive_timeout=NEVER_S,  # `check_limits` ends idle connections
            lingering_time=0,  # `_close_gracefully` lingers
            read_bufsize=READ_BUFFER_BYTES,
            auto_decompress=False,  # `bodies` does, within its budget
            max_line_size=HEAD_LINE_BYTES_MAX,
            max_field_size=HEAD_LINE_BYTES_MAX,
            max_headers=HEADERS_COUNT_MAX,
        )
        self.phase = ConnectionPhase.IDLE
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._request: web.BaseRequest | None = None  # present or last one
        self._phase_since = self._progress_at = self._loop.time()
        self._sent_bytes = self._pipelined_bytes = 0
        self.address = ""

    # Called by the event loop and aiohttp.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        tune_socket(transport)
        self._transport = transport
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        super().connection_made(transport)
        self._set_phase(ConnectionPhase.IDLE)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._transport = self._request = None
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        if data and self.phase is ConnectionPhase.IDLE:
            self._set_phase(ConnectionPhase.HEAD)
        is_pipelined = self.phase is ConnectionPhase.BUSY and not self.is_waiting
        super().data_received(data)
        if is_pipelined:  # afterwards: at the end of a body aiohttp reads on, whoever has paused
            self._limit_pipelining(len(data))
        if data:
            self._connections.update(self)

    def begin_request(self, request: web.BaseRequest) -> None:
        """Enter BUSY: a whole head has arrived and its handler runs."""
        self._request = request
        self._set_phase(ConnectionPhase.BUSY)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if request.writer.output_size and not resp.prepared:  # a partial response must not look complete
            release_body(request)
            self.abort()
            return resp, True
        is_unread, closes = not request.content.is_eof(), resp.headers.get(hdrs.CONNECTION) == "close"
        if is_unread or closes or request.method == hdrs.METH_CONNECT:  # what follows is no request
            resp.force_close()
        try:
            done = await super().finish_response(request, resp, start_time)
        finally:
            release_body(request)
            if isinstance(resp, web.Response):
                resp.body = None  # aiohttp keeps the response until the connection's next request
        if resp.keep_alive:
            self._set_phase(ConnectionPhase.IDLE)
            self._resume_pipelining()
        else:
            await self._close_gracefully()
        return done

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Response to an unreadable request or an unexpected exception of a handler."""
        if request.writer.output_size:
            raise ConnectionResetError("an answer that has begun can't become an error")
        with request_context(request_id := get_request_id(request)):
            if status < 500:
                error = translate_parser_error(exc, message or "", status)
                log.info("refused an unreadable request from %s: %s", request.remote, error)
            else:
                log.error("%s %s failed", request.method[:16], redact_path(request.path), exc_info=exc)
                error = ClientError(status, encode_error_body("The proxy failed; its log says why.", "server_error"))
        self._connections.on_error(error)
        headers = {"Connection": "close", **SERVER_HEADERS}  # explicit, since garbage is parsed as HTTP/1.0
        response = error.build_response(error.body, headers | build_id_headers(request_id))
        response.force_close()
        return response

    # Limits.

    @property
    def is_waiting(self) -> bool:
        """True while the client has to send, or to close, before anything can go on."""
        if self.phase is ConnectionPhase.BUSY:
            return self._request is not None and not self._request.content.is_eof()
        return self.phase is ConnectionPhase.CLOSING or not self._messages  # aiohttp's: heads that wait for handlers

    def makes_way(self, now: float) -> bool:
        """True for a waiting connection that a new one may take the place of: it has had the time to send something,
        and has taken what was sent to it.
        """
        is_new = self._request is None and self.phase is ConnectionPhase.IDLE
        return not (self.unsent_bytes or (is_new and now - self._phase_since < FIRST_BYTE_S))

    def displace(self) -> None:
        """Close a waiting connection for a new one; a client that has sent a part of a request gets an error."""
        if self.phase in (ConnectionPhase.HEAD, ConnectionPhase.BUSY):
            self._send_error(connections_full())
        else:
            self.force_close()

    def check_limits(self, now: float) -> None:
        """Close the connection if it has timed out."""
        limits = self._connections
        if self._is_send_stalled(now, limits.send_timeout_s):
            log.info("a client took nothing for %g s", limits.send_timeout_s)
            self.abort()
        elif self.phase is ConnectionPhase.HEAD and now - self._phase_since >= limits.receive_timeout_s:
            message = f"The request's head did not come within {limits.receive_timeout_s:g} s."
            self._send_error(bad_request(message, status=408, code="request_timeout"))
        elif self.phase is ConnectionPhase.IDLE and now - self._phase_since >= IDLE_TIMEOUT_S:
            self.force_close()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses that the kernel has not taken."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def abort(self) -> None:
        """Close at once and drop unsent bytes; the client sees a reset."""
        if self._transport:
            self._transport.abort()

    def _limit_pipelining(self, count: int) -> None:
        """Stop reading where too much lies behind the present request: each of many bodies would have a buffer."""
        self._pipelined_bytes += count
        if self._pipelined_bytes > PIPELINED_BYTES_MAX and self._transport:
            self._transport.pause_reading()

    def _resume_pipelining(self) -> None:
        """Read again, unless aiohttp has reasons of its own not to, and will do so later."""
        is_paused = self._pipelined_bytes > PIPELINED_BYTES_MAX
        self._pipelined_bytes = 0
        if is_paused and self._transport and not (self._buffer_paused or self._reading_paused):
            self._transport.resume_reading()

    def _is_send_stalled(self, now: float, timeout_s: float) -> bool:
        unsent = self.unsent_bytes
        taken = (self._request.writer.output_size if self._request else 0) - unsent
        if not unsent or taken != self._sent_bytes:
            self._sent_bytes, self._progress_at = taken, now
        return now - self._progress_at >= timeout_s

    def _send_error(self, error: ClientError) -> None:
        """Write an error without a request to answer, and close."""
        self._set_phase(ConnectionPhase.CLOSING)
        if self._transport and not self._transport.is_closing():
            self._connections.on_error(error)
            self._transport.write(encode_error_response(error))
        self.force_close()

    async def _close_gracefully(self) -> None:
        """Close the sending half first: a reset, from closing over unread bytes, could destroy the response."""
        self._set_phase(ConnectionPhase.CLOSING)
        self.close()
        if self._transport and not self._transport.is_closing():
            self._transport.write_eof()
            self._transport.resume_reading()
            await asyncio.sleep(LINGER_S)  # cancelled when the client closes its half

    def _set_phase(self, phase: ConnectionPhase) -> None:
        self.phase, self._phase_since = phase, self._loop.time()
        self._connections.update(self)


class RefusedConnection(asyncio.Protocol):
    """Connection above the limit: its first request gets an error, then it is closed."""

    def __init__(self, connections: "Connections") -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.refusals.add(self)
        asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._transport and not self._is_answered:  # some clients fail on a response before their request
            self._is_answered = True
            self._connections.on_error(error := connections_full())
            self._transport.write(encode_error_response(error))
            self._transport.write_eof()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.discard_refusal(self)


class Connections:
    """All connections of one listener, at most `count_max`."""

    def __init__(
        self, count_max: int, receive_timeout_s: float, send_timeout_s: float, on_error: Callable[[ClientError], object]
    ) -> None:
        """`on_error` is called with each error sent without a handler."""
        self.on_error, self.count_max = on_error, count_max
        self.receive_timeout_s, self.send_timeout_s = receive_timeout_s, send_timeout_s
        # Weak, since a socket that fails before `connection_made` gets no `connection_lost`.
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._waiting: dict[str, dict[Connection, None]] = {}  # by address, the longest without a byte first
        self.refusals: set[RefusedConnection] = set()
        self._changed = asyncio.Event()  # a connection may have a place now
        self._full_logged_at = float("-inf")

    @property
    def count(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return self.count >= self.count_max

    async def wait_for_place(self) -> None:
        """Wait until a socket can be admitted, or refused with an answer; others wait in the kernel meanwhile."""
        while not self._has_place():
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_BYTE_S):
                    await self._changed.wait()

    def _has_place(self) -> bool:
        if not self.is_full or self._find_displaceable():
            return True
        refusals_max = min(REFUSALS_COUNT_MAX, max(1, self.count_max // 2))
        return not self._waiting and len(self.refusals) < refusals_max

    def admit(self, server: web.Server) -> asyncio.Protocol:
        """Protocol for an accepted socket."""
        if self.is_full and not self.close_waiting():
            now = asyncio.get_running_loop().time()
            if now - self._full_logged_at >= LOG_INTERVAL_S:
                self._full_logged_at = now
                log.warning("%d connections are open and all are being answered: new ones are refused", self.count)
            return RefusedConnection(self)
        connection = Connection(self, server)
        self._open.add(connection)
        return connection

    def update(self, connection: Connection) -> None:
        """Register a changed phase or a received byte, also of a closed connection: its handler ends later."""
        self._drop_waiting(connection)
        if connection in self._open and connection.is_waiting:
            self._waiting.setdefault(connection.address, {})[connection] = None
        self._changed.set()

    def discard(self, connection: Connection) -> None:
        self._drop_waiting(connection)
        self._open.discard(connection)
        self._changed.set()

    def discard_refusal(self, refusal: RefusedConnection) -> None:
        self.refusals.discard(refusal)
        self._changed.set()

    def _drop_waiting(self, connection: Connection) -> None:
        if (waiting := self._waiting.get(connection.address)) is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[connection.address]

    async def sweep(self) -> None:
        """Check all connections' limits periodically, until cancelled."""
        loop = asyncio.get_running_loop()
        interval_s = min(SWEEP_INTERVAL_MAX_S, self.receive_timeout_s / 4, self.send_timeout_s / 4)
        while True:
            await asyncio.sleep(interval_s)
            for connection in list(self._open):
                connection.check_limits(loop.time())

    def abort(self) -> None:
        for connection in list(self._open):
            connection.abort()

    def close_waiting(self) -> bool:
        """Close a connection that waits for its client, if any."""
        if (connection := self._find_displaceable()) is not None:
            self.discard(connection)
            connection.displace()
        return connection is not None

    def _find_displaceable(self) -> Connection | None:
        """The connection that makes way first: the longest without a byte of the address with the most."""
        now = asyncio.get_running_loop().time()
        for waiting in sorted(self._waiting.values(), key=len, reverse=True):
            longest = next((connection for connection in waiting if connection.makes_way(now)), None)
            if longest is not None:
                return longest
        return None


CONNECTIONS = web.AppKey("connections", Connections)  # for the status


@web.middleware
async def connection_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Notify the connection that its request is being handled.  Its body is released once the response is sent."""
    if isinstance(request.protocol, Connection):
        request.protocol.begin_request(request)
    try:
        return await handler(request)
    except BaseException:
        release_body(request)
        raise


def connections_full() -> ClientError:
    body = encode_error_body("The proxy has all the connections that it may have.", "server_error", "connections_full")
    return ClientError(503, body, RETRY_AFTER_S)


def encode_error_response(error: ClientError) -> bytes:
    """HTTP bytes of an error that answers no request."""
    with request_context(request_id := new_request_id()):
        log.info("refused: %s", error)
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(error.body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in build_id_headers(request_id).items()),
    ]
    if error.retry_after_s is not None:
        lines.append(f"Retry-After: {error.retry_after_s}")
    return "\r\n".join([*lines, "", ""]).encode() + error.body


def tune_socket(transport: asyncio.Transport) -> None:
    """Enable keepalive with short intervals, and limit the send buffer for slow readers."""
    options = [
        (socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, KEEPALIVE_IDLE_OPTION, KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
    ]
    with suppress(OSError):  # already closed
        for level, name, value in options:
            transport.get_extra_info("socket").setsockopt(level, name, value)
