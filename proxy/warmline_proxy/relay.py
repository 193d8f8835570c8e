"""From the backend's events to the client's answer: streamed event by event, or folded into one JSON.

An error before the first byte is a proper HTTP status.  After it, an `error` event without `[DONE]`; never a clean end.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from warmline_proxy.errors import ClientError, bad_gateway, error_body
from warmline_proxy.generation import Generation
from warmline_proxy.normalize import Call
from warmline_proxy.trace import Trace
from warmline_proxy.upstream import UpstreamError
from warmline_wire.stream import ChunkFold, Event, data_event

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
CUT_OFF = "The backend ended its answer early."

Chunk = dict[str, msgspec.Raw]


async def relay(
    request: web.Request, call: Call, generation: Generation, trace: Trace, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Raises ClientError or UpstreamError where nothing was sent; ConnectionResetError where the client has left."""
    if call.stream:
        return await _relay_stream(request, call, generation, trace, headers)
    return await _relay_json(call, generation, trace, headers)


async def _relay_stream(
    request: web.Request, call: Call, generation: Generation, trace: Trace, headers: Mapping[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={**STREAM_HEADERS, **headers})
    try:
        whole = False
        async for event in generation.events():
            out = client_event(event, call, trace)
            if out and not response.prepared:
                await response.prepare(request)
            if out:
                await response.write(out)
            whole = whole or event.data == b"[DONE]"
        if not whole:
            raise bad_gateway(CUT_OFF)
    except (ClientError, UpstreamError) as error:
        if not response.prepared:
            raise
        trace.failed(error)
        await response.write(data_event(_error_payload(error)))
    await response.write_eof()
    return response


async def _relay_json(
    call: Call, generation: Generation, trace: Trace, headers: Mapping[str, str]
) -> web.StreamResponse:
    fold, whole = ChunkFold(), False
    async for event in generation.events():
        if event.data == b"[DONE]":
            whole = True
        elif event.data:
            fold.add(_checked_chunk(event, trace))
    if not whole:
        raise bad_gateway(CUT_OFF)
    answer = fold.result()
    if call.client_model is not None:
        answer["model"] = call.client_model
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json", headers=dict(headers))


def client_event(event: Event, call: Call, trace: Trace) -> bytes:
    """What of an event the client gets: b"" for nothing.  Raises ClientError for the backend's error event."""
    if event.comment or not event.data or event.data == b"[DONE]":
        return event.raw
    chunk = _parse(event.data, Chunk)
    if "error" in chunk:
        raise _stream_error(event.data)
    if not trace.ttft_s and _has_content(event.data):
        trace.saw_content()
    if not call.include_usage and _usage_only(chunk):
        return b""
    return data_event(_rewritten(chunk, call).replace(b"\n", b"\ndata: "))  # newlines between JSON's tokens, if any


def _rewritten(chunk: Chunk, call: Call) -> bytes:
    """The chunk under the client's model name; all other values are the bytes that came."""
    if call.client_model is not None and "model" in chunk:
        chunk["model"] = msgspec.Raw(msgspec.json.encode(call.client_model))
    if not call.include_usage:
        chunk.pop("usage", None)
    return msgspec.json.encode(chunk)


def _usage_only(chunk: Chunk) -> bool:
    return "usage" in chunk and bytes(chunk.get("choices", b"[]")) == b"[]"


def _has_content(data: bytes) -> bool:
    """Whether a chunk carries text, or ends a text that was empty."""
    for choice in _parse(data, dict[str, Any]).get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(delta[key] for key in delta if key != "role"):
            return True
    return False


def _checked_chunk(event: Event, trace: Trace) -> dict[str, Any]:
    chunk: dict[str, Any] = _parse(event.data, dict[str, Any])
    if "error" in chunk:
        raise _stream_error(event.data)
    if not trace.ttft_s and _has_content(event.data):
        trace.saw_content()
    return chunk


def _parse(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise bad_gateway(f"The backend sent an unreadable chunk: {error}") from error


def _stream_error(payload: bytes) -> ClientError:
    """The backend's own words, under the status that suits them."""
    error = _parse(payload, dict[str, Any])["error"]
    kind = error.get("type") if isinstance(error, dict) else ""
    return ClientError(400 if kind == "invalid_request_error" else 500, payload)


def _error_payload(error: ClientError | UpstreamError) -> bytes:
    if isinstance(error, ClientError):
        return error.body
    return error_body(str(error), "server_error", "backend_failed")
