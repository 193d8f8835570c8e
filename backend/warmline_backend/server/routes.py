"""HTTP routes of the backend: the contract of warmline_common.protocol.messages, and OpenAI's endpoints.

Errors are translated here, once, into OpenAI's error object with a status that the proxy acts on:

    BadRequestError 400 (or its own)    KvTooLargeError, BadChainError, DecodeError 400
    UnknownGenerationError 404          ResidentMismatchError, DamagedFileError 409
    ResidentNotFoundError, RowsUnavailableError, UnknownPromptError 410
    OperationCancelledError, ConnectionResetError 499
    NotReadyError, EngineStoppedError 503       OSError 507
"""

import asyncio
import errno
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from warmline_backend.engine.engine import EngineStoppedError
from warmline_backend.engine.inflight import InflightGeneration, UnknownGenerationError
from warmline_backend.generation.sequence import GenerationOptions
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.kv_cache.residents import ResidentMismatchError, ResidentNotFoundError
from warmline_backend.kv_cache.segment_io import BadChainError, DamagedFileError, OperationCancelledError
from warmline_backend.request.params import BadRequestError
from warmline_backend.scheduler.capacity import KvTooLargeError
from warmline_backend.server.prompt_store import UnknownPromptError
from warmline_backend.server.response import GenerationResponse
from warmline_backend.server.service import NotReadyError, Service
from warmline_common.logging import request_context
from warmline_common.process.loopback import DOCKER_HOST, is_local
from warmline_common.process.redaction import quote_text, redact_path
from warmline_common.protocol import messages
from warmline_common.protocol.messages import decode, encode

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_BYTES_MAX = 512 << 20
STATUS_CLIENT_GONE = 499  # nginx's
RETRY_AFTER_S = "2"
SEND_TIMEOUT_S = 300.0  # for the next piece of a stream to be taken
POLLED_PATHS = ("/health", "/metrics", "/kv/status")  # too frequent to log
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,80}")  # the proxy may append suffixes to a client's id
_TOKEN_COUNT = _NUMBER = re.compile(r"[0-9]{1,12}")
# Without streaming; other finishes are 500.
STATUS_BY_FINISH = {"cancelled": STATUS_CLIENT_GONE, "discarded": 503, "leaderless": 503}


def make_app(service: Service, secret: str) -> web.Application:
    """Make the application; all calls must bear `secret`, except /health, and /metrics from this machine."""
    middlewares = [_bind_request_id, _translate_errors, _authenticate(secret)]
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=middlewares)
    routes = _Routes(service)
    app.add_routes(
        [
            web.get("/health", routes.health),
            web.get("/ready", routes.ready),
            web.get("/metrics", routes.metrics),
            web.get("/v1/models", routes.models),
            web.get("/v1/models/{model:.+}", routes.model),
            web.post("/v1/chat/completions", partial(routes.generate, endpoint="chat")),
            web.post("/v1/completions", partial(routes.generate, endpoint="completion")),
            web.post("/kv/prompts", routes.prompts),
            web.post("/kv/texts", routes.texts),
            web.post("/kv/restore", routes.restore),
            web.post("/kv/save", routes.save),
            web.get("/kv/status", routes.status),
            web.put("/kv/memory", routes.set_memory_share),
            web.get("/kv/residents", routes.residents),
            web.put("/kv/residents/order", routes.set_eviction_order),
            web.delete("/kv/residents/{resident}", routes.delete_resident),
            web.post("/kv/forget", routes.clear_cache),
            web.delete("/requests/{request}", routes.cancel),
        ]
    )
    return app


@web.middleware
async def _bind_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: bind log records to the request id of the proxy's call."""
    request_id, began = request.headers.get(messages.HEADER_REQUEST, ""), time.monotonic()
    with request_context(request_id if _REQUEST_ID.fullmatch(request_id) else ""):
        response = await handler(request)
        if request.path not in POLLED_PATHS:
            path, seconds = redact_path(request.path), time.monotonic() - began
            log.debug("%s %s: %d after %.3f s", request.method[:16], path, response.status, seconds)
        return response


def _authenticate(secret: str) -> Any:
    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not (_is_public(request) or hmac.compare_digest(given, expected)):
            return _error(401, "the backend's secret is missing or wrong; talk to the proxy instead", "authentication")
        return await handler(request)

    return middleware


def _is_public(request: web.Request) -> bool:
    """True where no secret is required: on this machine, load figures are not confidential."""
    if request.path == "/metrics":
        return is_local(request.remote or "", request.headers.getall("Host", []), (DOCKER_HOST,))
    return request.path == "/health"


@web.middleware
async def _translate_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as error:
        return web.Response(status=error.status, body=error.encode_reply(), content_type="application/json")
    except msgspec.DecodeError as error:
        return _error(400, f"We could not parse the JSON body of your request: {error}")
    except BadChainError as error:
        return _error(400, str(error))
    except KvTooLargeError as error:
        return _error(400, str(error), code="kv_memory_exceeded")
    except ResidentMismatchError as error:
        return _error(409, str(error), code="resident_mismatch")
    except (ResidentNotFoundError, RowsUnavailableError, UnknownPromptError) as error:
        return _error(410, f"{type(error).__name__}: {error}", code="gone")
    except UnknownGenerationError as error:
        return _error(404, f"no request {error} is running here", code="unknown_request")
    except OperationCancelledError:
        return _error(STATUS_CLIENT_GONE, "cancelled", code="cancelled")
    except (NotReadyError, EngineStoppedError) as error:
        return _error(503, str(error), "unavailable", headers={"Retry-After": RETRY_AFTER_S})
    except ConnectionResetError:  # an OSError too, but not the disk's
        return _error(STATUS_CLIENT_GONE, "the client has left", code="cancelled")
    except OSError as error:
        return _error(507, f"writing failed: {error}", "storage", code=errno.errorcode.get(error.errno or 0, "EIO"))
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")


def _error(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    *,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    body = encode(messages.ErrorReply(error=messages.ErrorBody(message=message, type=kind, code=code)))
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _json(message: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=encode(message), content_type="application/json")


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    # ---- state

    async def health(self, request: web.Request) -> web.Response:
        return _json(self._service.read_health())

    async def ready(self, request: web.Request) -> web.Response:
        reason = await self._service.find_readiness_problem()
        return _json({"ready": not reason, "reason": reason}, 503 if reason else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._service.metrics.render_exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def status(self, request: web.Request) -> web.Response:
        return _json(self._service.read_status())

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._describe_model(self._service.served_name)]})

    async def model(self, request: web.Request) -> web.Response:
        return _json(self._describe_model(request.match_info["model"]))

    def _describe_model(self, name: str) -> dict[str, object]:
        """Model object; every name is answered by the one model."""
        root, created = self._service.served_name, self._service.read_status().model_created
        return {"id": name, "object": "model", "created": created, "owned_by": "warmline", "root": root}

    # ---- kv

    async def prompts(self, request: web.Request) -> web.Response:
        raw = await request.read()
        return _json(await self._service.create_prompt(decode(raw, messages.PromptRequest), len(raw)))

    async def texts(self, request: web.Request) -> web.Response:
        body = await _read_body(request, messages.DetokenizeRequest)
        return _json(messages.DetokenizeReply(texts=await self._service.decode_texts(body.sequences)))

    async def restore(self, request: web.Request) -> web.Response:
        try:
            return _json(await self._service.restore(await _read_body(request, messages.RestoreRequest)))
        except DamagedFileError as error:
            status = self._service.read_status()
            refused = messages.RestoreRefusal(
                boot=status.boot,
                generation=status.generation,
                reason=error.reason,
                bad=error.file_id,
                good_prefix=error.good_prefix,
                detail=error.detail,
            )
            return _json(refused, 409)

    async def save(self, request: web.Request) -> web.Response:
        return _json(await self._service.save(await _read_body(request, messages.SaveRequest)))

    async def residents(self, request: web.Request) -> web.Response:
        ids, since = request.query.get("ids", ""), request.query.get("since", "0")
        if not _NUMBER.fullmatch(since):
            raise BadRequestError(f"since={quote_text(since)}: expected the revision of an earlier listing", "since")
        only_ids = [] if ids in ("", "1") else ids.split(",")
        if len(only_ids) > messages.RESIDENT_IDS_MAX:
            raise BadRequestError(f"ids names more than {messages.RESIDENT_IDS_MAX} residents; ids=1 lists all", "ids")
        return _json(self._service.list_residents(with_ids=ids == "1", since=int(since), only_ids=only_ids))

    async def delete_resident(self, request: web.Request) -> web.Response:
        dropped = await self._service.delete_resident(request.match_info["resident"])
        return _json({"dropped": dropped}, 200 if dropped else 410)

    async def clear_cache(self, request: web.Request) -> web.Response:
        kind = messages.ClearCacheRequest
        body = await _read_body(request, kind) if request.can_read_body else kind()
        await self._service.clear_cache(body.keep)
        return _json({})

    async def set_eviction_order(self, request: web.Request) -> web.Response:
        order = await _read_body(request, messages.EvictionOrder)
        await self._service.set_eviction_order(order.drop_first, extends=order.extends)
        return _json({})

    async def set_memory_share(self, request: web.Request) -> web.Response:
        return _json(await self._service.set_memory_share(await _read_body(request, messages.MemoryShare)))

    async def cancel(self, request: web.Request) -> web.Response:
        request_id, finish = request.match_info["request"], request.query.get("finish")
        if finish is None:
            return _json(await self._service.cancel(request_id))
        if finish != "prefill":
            raise BadRequestError(f"finish={finish}: expected prefill, or no finish at all to cancel at once", "finish")
        result = await self._service.finish_prefill(request_id)
        return _json(result) if result else _json({}, 202)

    # ---- generations

    async def generate(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        """Generate from a prompt rendered ahead for the proxy (no body; always streamed with usage), or from a body."""
        service, headers = self._service, request.headers
        leader, resident = messages.HEADER_FOLLOW, messages.HEADER_RESIDENT
        if leader in headers and resident in headers:
            raise BadRequestError(f"a request starts from {leader} or from {resident}, not from both")
        with service.accept(headers.get(messages.HEADER_REQUEST) or secrets.token_hex(8)) as inflight:
            if prompt_id := headers.get(messages.HEADER_PROMPT):
                prompt = service.prompts.get(prompt_id)
            else:
                raw = await request.read()
                prompt = await service.render_prompt(endpoint, decode(raw, dict[str, Any]), len(raw))
            options = _parse_options(headers)
            if options.background and prompt.params.max_tokens != 1:
                header = messages.HEADER_BACKGROUND
                raise BadRequestError(f"with {header} one token is computed: send max_tokens 1", "max_tokens")
            await service.generate(inflight, prompt, options)
            streamed = bool(prompt_id) or prompt.params.stream
            with_usage = bool(prompt_id) or prompt.params.include_usage or not streamed
            decoder = service.runtime.token_decoder
            answer = GenerationResponse(prompt, inflight.id, service.served_name, decoder, with_usage)
            if streamed:
                return await self._respond_streamed(request, answer, inflight)
            folded = await answer.fold(inflight.events)
            if answer.error_code:
                return _error(400, answer.error, code=answer.error_code)
            if answer.error:
                status = STATUS_BY_FINISH.get(answer.finish, 500)
                return _error(status, answer.error, "server_error", code=answer.finish)
            return _json(folded)

    async def _respond_streamed(
        self, request: web.Request, answer: GenerationResponse, inflight: InflightGeneration
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            async for data in answer.stream(inflight.events, closing_event=messages.HEADER_REQUEST in request.headers):
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await response.write(data)
            await response.write_eof()
        except TimeoutError:
            text = "request %s: the client has read nothing for %g s; its connection is closed"
            log.warning(text, inflight.id, SEND_TIMEOUT_S)
            if request.transport is not None:
                request.transport.abort()
        return response


async def _read_body(request: web.Request, kind: type[T]) -> T:
    return decode(await request.read(), kind)


def _parse_options(headers: Any) -> GenerationOptions:
    background = headers.get(messages.HEADER_BACKGROUND, "")
    return GenerationOptions(
        resident_id=headers.get(messages.HEADER_RESIDENT, ""),
        leader_id=headers.get(messages.HEADER_FOLLOW, ""),
        reuse_tokens=_parse_token_count(headers, messages.HEADER_REUSE),
        copy_resident=headers.get(messages.HEADER_KEEP) == "1",
        # A resident is found by its request's id.
        leaves_resident=messages.HEADER_REQUEST in headers and background != messages.BACKGROUND_DROP,
        background=background in (messages.BACKGROUND_DROP, messages.BACKGROUND_KEEP),
        root=_parse_root(headers),
        checkpoints=_parse_checkpoints(headers),
    )


def _parse_token_count(headers: Any, name: str) -> int:
    text = headers.get(name, "0")
    if not _TOKEN_COUNT.fullmatch(text):
        raise BadRequestError(f"the header {name} must be a number of tokens, not {quote_text(text)}")
    return int(text)


def _parse_root(headers: Any) -> bytes:
    text = headers.get(messages.HEADER_ROOT, "")
    if not re.fullmatch(r"(?:[0-9a-f]{32})?", text):
        raise BadRequestError(f"the header {messages.HEADER_ROOT} must be 32 hexadecimal digits")
    return bytes.fromhex(text)


def _parse_checkpoints(headers: Any) -> tuple[int, ...]:
    texts = [text for text in headers.get(messages.HEADER_CHECKPOINTS, "").replace(" ", "").split(",") if text]
    if not all(map(_TOKEN_COUNT.fullmatch, texts)):
        raise BadRequestError(f"the header {messages.HEADER_CHECKPOINTS} must be token positions, such as 120,800")
    return tuple(sorted({int(text) for text in texts}))
