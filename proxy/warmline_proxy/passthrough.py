"""Every path that the proxy has no words of its own for goes to the backend as it came."""

from collections.abc import Iterable, Mapping

from aiohttp import web

from warmline_proxy.bodies import read_body, send
from warmline_proxy.errors import bad_request
from warmline_proxy.upstream import ByteStream, Upstream, UpstreamError

# RFC 9110, section 7.6.1; Keep-Alive and Proxy-Connection are older, but seen.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The client's key is not the backend's secret; the body is sent decompressed, with a length of its own.
NOT_FORWARDED = frozenset({"authorization", "x-api-key", "host", "content-length", "content-encoding", "expect"})
PRIVATE = frozenset({"kv", "requests", "health", "ready", "warmline"})  # between proxy and backend alone


def is_forwardable(path: str) -> bool:
    """Whether a decoded path may reach the backend under the proxy's secret."""
    segments = path.split("/")
    first = next((segment for segment in segments if segment), "")
    return first.lower() not in PRIVATE and not {".", ".."} & set(segments) and "\\" not in path


def end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without the headers that mean this connection only, those named by Connection among them."""
    kept = list(headers)
    named = {name.strip().lower() for key, value in kept if key.lower() == "connection" for name in value.split(",")}
    return [(key, value) for key, value in kept if key.lower() not in HOP_BY_HOP | named]


def request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    forwarded = {
        name: value
        for name, value in end_to_end(headers.items())
        if name.lower() not in NOT_FORWARDED and not name.lower().startswith("x-warmline-")
    }
    return {"Accept-Encoding": "identity", "User-Agent": "warmline", **forwarded}


async def forward(
    request: web.Request, upstream: Upstream, receive_timeout_s: float, send_timeout_s: float
) -> web.StreamResponse:
    """Raises ClientError 404 for what is not the client's to reach, UpstreamError where the backend fails.

    The timeouts are for the next piece of the request, and for the client to take the next one of its answer.
    """
    if not is_forwardable(request.path):
        raise bad_request(f"Unknown path {request.path}", status=404, code="not_found")
    target = request.rel_url.raw_path.rstrip("/") or "/"
    if request.rel_url.raw_query_string:
        target += f"?{request.rel_url.raw_query_string}"
    body = await read_body(request, receive_timeout_s)
    stream = await upstream.forward(request.method, target, request_headers(request.headers), body)
    try:
        return await _answer(request, stream, send_timeout_s)
    finally:
        await stream.close()


async def _answer(request: web.Request, stream: ByteStream, send_timeout_s: float) -> web.StreamResponse:
    response = web.StreamResponse(status=stream.status)
    for name, value in end_to_end(stream.headers):
        response.headers.add(name, value)
    await response.prepare(request)
    try:
        async for data in stream.chunks():
            await send(response, data, send_timeout_s)
    except UpstreamError:
        if request.transport:
            request.transport.abort()  # half a body must not look whole
        raise ConnectionResetError("the backend broke off") from None
    await response.write_eof()
    return response
