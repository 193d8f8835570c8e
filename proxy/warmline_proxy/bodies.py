"""Reading a client's body: sized, chunked or compressed, and never larger than the limit."""

from aiohttp import web

from warmline_proxy.errors import bad_request

BODY_BYTES_MAX = 64 * 1024 * 1024


async def read_body(request: web.Request) -> bytes:
    """The whole body, decompressed.  Raises ClientError 400 or 413."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise bad_request(f"The body is larger than {BODY_BYTES_MAX} bytes.", status=413) from None
    except web.RequestPayloadError as error:
        raise bad_request(f"The body can't be read: {error}") from error
