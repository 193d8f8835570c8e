"""Reading of request bodies (sized, chunked or compressed, up to a limit) and writing of responses.

Transfers may take long while they progress: timeouts apply to the time without a byte.
"""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web

from warmline_common.process.redaction import redact
from warmline_common.protocol.messages import decode, encode
from warmline_proxy.errors import bad_request
from warmline_proxy.http.content_coding import create_decoder

T = TypeVar("T")

BODY_BYTES_MAX = 64 * 1024 * 1024
SERVER_HEADERS = {"Server": "warmline"}  # aiohttp's own reveals versions


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """JSON response without spaces, as the backend and the streams write it."""
    return web.Response(status=status, body=encode(value), content_type="application/json", headers=headers)


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """Read the whole body, decompressed.  Raises ClientError 400, 413, 415, or 408 after `timeout_s` without a byte."""
    decoder = create_decoder(request.headers.getall(hdrs.CONTENT_ENCODING, []))
    body, size = bytearray(), request.content_length or 0
    try:
        while size <= BODY_BYTES_MAX:
            async with asyncio.timeout(timeout_s):
                data = await request.content.readany()
            if not data:
                decoder.finish()
                return bytes(body)
            for piece in decoder.decode(data):
                body += piece
                if (size := len(body)) > BODY_BYTES_MAX:
                    break
                await asyncio.sleep(0)  # a small body may become a large one
    except TimeoutError:
        message = f"No more of the body came for {timeout_s:g} s."
        raise bad_request(message, status=408, code="request_timeout") from None
    except web.RequestPayloadError as error:
        raise bad_request(f"The body can't be read: {redact(str(error))}") from error
    raise bad_request(f"The body is larger than {BODY_BYTES_MAX} bytes.", status=413)


async def read_message(request: web.Request, kind: type[T], name: str, timeout_s: float) -> T:
    """Decoded body of an admin request.  Raises ClientError as `read_body`, and 400 for another body."""
    try:
        return decode(await read_body(request, timeout_s), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"Not a {name}: {error}") from error


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
