"""Reading of request bodies (sized, chunked or compressed, up to limits) and writing of responses.

Transfers may take long while they progress: timeouts apply to the time without a byte, and to a rate that no link of
today is below.
"""

import asyncio
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web

from warmline_common.process.redaction import redact
from warmline_common.protocol.json_structure import JSON_DEPTH_MAX, JsonStructure
from warmline_common.protocol.messages import decode, encode
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.body_budget import BodyBudget, RequestBody
from warmline_proxy.http.content_coding import ContentDecoder, create_decoder

T = TypeVar("T")

BODY_BYTES_MAX = 64 * 1024 * 1024
BODY_RATE_MIN_BYTES_S = 1000  # on average, on the wire, after BODY_RATE_GRACE_S
BODY_RATE_GRACE_S = 30.0
INLINE_BYTES_MAX = 64 * 1024  # of a body that are read without letting others go on in between
# A parser's time, and the memory of what it makes, depend on these more than on bytes.
FIELDS_MAX = 1000  # of a body; each is looked at, and sent on
JSON_CONTAINERS_MAX = 100_000  # objects and lists
JSON_STRINGS_MAX = 250_000  # with names of fields
JSON_VALUES_MAX = 2_000_000
CONTAINER_BYTES, STRING_BYTES, VALUE_BYTES = 256, 64, 16  # of Python's objects, about
SERVER_HEADERS = {"Server": "warmline"}  # aiohttp's own reveals versions

REQUEST_BODY = web.RequestKey("body", RequestBody)


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """JSON response without spaces, as the backend and the streams write it."""
    return bytes_response(encode(value), status=status, headers=headers)


def bytes_response(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Response of a JSON text.  A large one is sent in pieces, as its client takes them, and not copied."""
    data = body if len(body) <= INLINE_BYTES_MAX else io.BytesIO(body)
    return web.Response(status=status, body=data, content_type="application/json", headers=headers)


class BodyReader:
    """Reads all bodies of one proxy, within one budget.  Each counts until `release_body`."""

    def __init__(self, budget: BodyBudget, receive_timeout_s: float) -> None:
        self._budget, self._receive_timeout_s = budget, receive_timeout_s
        self._turn = asyncio.Lock()  # of large bodies: one part at a time, whichever body it belongs to

    async def read(self, request: web.Request, caller: str = "") -> bytes:
        """Read the whole body, decompressed: JSON within our bounds, if it is JSON.

        Raises ClientError: 400 where it can't be read or exceeds a bound, 413, 415 for its coding, 408 where it comes
        too slowly, 503 where there is no memory for it.
        """
        decoder = create_decoder(request.headers.getall(hdrs.CONTENT_ENCODING, []))
        body = self.open_body(request, caller)
        await self._receive(request, body, decoder)
        decoder.finish()
        return body.take()

    def open_body(self, request: web.Request, caller: str = "") -> RequestBody:
        """The request's body, from now on counted."""
        if (body := request.get(REQUEST_BODY)) is None:
            body = request[REQUEST_BODY] = self._budget.open_body(caller or f"at {request.remote}")
        return body

    async def read_stored(self, body: RequestBody, data: bytes, coding: str) -> "StoredText":
        """Read stored JSON that a request refers to, decompressed; it counts as a part of the request's body.

        Raises ClientError 503 where there is no memory for it, 413 where there never is, ValueError for damaged data.
        """
        began, structure, text = body.counted_bytes, JsonStructure(), bytearray()
        compressed_bytes = 0 if coding == "identity" else len(data)  # plain data are the index's own buffer
        try:
            body.count(compressed_bytes)
            for part in _decode_stored(data, coding):
                body.count(len(part) + _feed(structure, part))
                text += part
                if len(text) > INLINE_BYTES_MAX:
                    async with self._turn:
                        await asyncio.sleep(0)
            body.discount(compressed_bytes)
        except BaseException:
            body.discount(body.counted_bytes - began)
            raise
        return StoredText(text, structure, body.counted_bytes - began)

    async def read_message(self, request: web.Request, kind: type[T], name: str) -> T:
        """Decoded body of an admin request.  Raises ClientError as `read`, and 400 for another body."""
        try:
            return decode(await self.read(request), kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"Not a {name}: {error}") from error

    async def _receive(self, request: web.Request, body: RequestBody, decoder: ContentDecoder) -> None:
        self._check_size(request.content_length or 0)
        began = asyncio.get_running_loop().time()
        while piece := await self._receive_piece(request, body, began):
            self._check_size(request.content.total_bytes)
            for part in decoder.decode(piece):
                if body.size + len(part) <= INLINE_BYTES_MAX:
                    self._add_part(body, part)
                    continue
                async with self._turn:
                    self._add_part(body, part)
                    await asyncio.sleep(0)

    async def _receive_piece(self, request: web.Request, body: RequestBody, began: float) -> bytes:
        """Next bytes of the body, b"" at its end."""
        body.check_kept()
        now = asyncio.get_running_loop().time()
        rate_deadline = began + BODY_RATE_GRACE_S + request.content.total_bytes / BODY_RATE_MIN_BYTES_S
        try:
            async with asyncio.timeout_at(min(now + self._receive_timeout_s, rate_deadline)) as timeout:
                body.on_displaced = partial(_end_now, timeout)
                return await request.content.readany()
        except TimeoutError:
            body.check_kept()
            message = (
                f"No more of the body came for {self._receive_timeout_s:g} s, or less than {BODY_RATE_MIN_BYTES_S} "
                "bytes a second."
            )
            raise bad_request(message, status=408, code="request_timeout") from None
        except web.RequestPayloadError as error:
            raise bad_request(f"The body can't be read: {redact(str(error))}") from error
        finally:
            body.on_displaced = bool

    def _add_part(self, body: RequestBody, part: bytes) -> None:
        parsed_bytes = _feed(body.structure, part)
        check_structure(body.structure)
        self._check_size(body.size + len(part), estimate_parsed_bytes(body.structure))
        body.append(part, parsed_bytes)

    def _check_size(self, size: int, parsed_bytes: int = 0) -> None:
        """Raises ClientError 413 for a body that no budget has room for, or not this one, whatever else it holds."""
        if size > BODY_BYTES_MAX:
            raise bad_request(f"The body is larger than {BODY_BYTES_MAX} bytes.", status=413)
        if size + parsed_bytes > (bytes_max := self._budget.caller_bytes_max):
            message = (
                f"The body takes more than the {bytes_max} bytes of memory that body_budget_mb leaves one client; "
                "raise that setting, or send less."
            )
            raise bad_request(message, status=413)


@dataclass(frozen=True)
class StoredText:
    """Stored JSON that a request has read."""

    data: bytearray
    structure: JsonStructure
    counted_bytes: int  # for it, in the request's body


def _decode_stored(data: bytes, coding: str) -> Iterator[bytes]:
    decoder = create_decoder([coding])
    try:
        yield from decoder.decode(data)
        decoder.finish()
    except ClientError as error:
        raise ValueError(str(error)) from None


def _feed(structure: JsonStructure, part: bytes) -> int:
    """Count a part's structure; memory of the values that it adds."""
    counted = estimate_parsed_bytes(structure)
    structure.feed(part)
    return estimate_parsed_bytes(structure) - counted


def _end_now(timeout: asyncio.Timeout) -> None:
    if not timeout.expired():
        timeout.reschedule(asyncio.get_running_loop().time())


def release_body(request: web.BaseRequest) -> None:
    """End a request's body, if it has been read."""
    if (body := request.get(REQUEST_BODY)) is not None:
        body.release()


def estimate_parsed_bytes(structure: JsonStructure) -> int:
    """Memory of the parsed values, beside their text."""
    containers, strings = structure.containers * CONTAINER_BYTES, structure.strings * STRING_BYTES
    return containers + strings + structure.separators * VALUE_BYTES


def measure_structure(value: msgspec.Raw) -> JsonStructure:
    structure, view = JsonStructure(), memoryview(value)
    for at in range(0, view.nbytes, INLINE_BYTES_MAX):
        structure.feed(bytes(view[at : at + INLINE_BYTES_MAX]))
    return structure


def check_structure(structure: JsonStructure) -> None:
    """Raises ClientError 400 for JSON that would take too long to parse, or that nests too deeply."""
    bounds = {
        f"{JSON_DEPTH_MAX} levels of objects and lists": structure.depth_max > JSON_DEPTH_MAX,
        f"{FIELDS_MAX} fields": structure.top_separators >= FIELDS_MAX,
        f"{JSON_CONTAINERS_MAX} objects and lists": structure.containers > JSON_CONTAINERS_MAX,
        f"{JSON_STRINGS_MAX} strings, with names of fields": structure.strings > JSON_STRINGS_MAX,
        f"{JSON_VALUES_MAX} values": structure.separators >= JSON_VALUES_MAX,
    }
    for bound, is_exceeded in bounds.items():
        if is_exceeded:
            message = (
                f"The JSON body of your request has more than {bound}, with the stored items that it refers to; "
                "send less in one request."
            )
            raise bad_request(message)


async def set_server_header(_: web.Request, response: web.StreamResponse) -> None:
    """Handler of aiohttp's on_response_prepare signal."""
    response.headers.update(SERVER_HEADERS)


async def write_chunk(response: web.StreamResponse, data: bytes, timeout_s: float) -> None:
    """Write bytes.  Raises ConnectionResetError if the client disconnected or takes nothing for `timeout_s`.

    The handler's end aborts the connection of an incomplete response (see `connections`).
    """
    try:
        async with asyncio.timeout(timeout_s):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError(f"the client took nothing for {timeout_s:g} s") from None
