"""Fake backend with the real protocol on a real socket: one byte per token, no model."""

import asyncio
import json
from collections import defaultdict
from typing import Any

from aiohttp import web

from support.proxy.fake_replies import (
    SERVED,
    make_chunk,
    make_chunk_durations,
    make_first_logits,
    make_layout,
    make_timings,
    make_usage_chunk,
    pack_text,
    render_prompt,
)
from warmline_common.protocol.messages import (
    HEADER_BACKGROUND,
    HEADER_CHECKPOINTS,
    HEADER_PROMPT,
    HEADER_REQUEST,
    HEADER_RESIDENT,
    HEADER_REUSE,
    HEADER_ROOT,
    RESULT_EVENT,
    BackendStatus,
    ClearCacheRequest,
    ErrorBody,
    ErrorReply,
    EvictionOrder,
    GenerationResult,
    HealthReply,
    PrefillRate,
    PromptReply,
    PromptRequest,
    Reply,
    Resident,
    ResidentsReply,
    RestoreRefusal,
    RestoreReply,
    RestoreRequest,
    SampledTurn,
    SavedFile,
    SaveReply,
    SaveRequest,
    decode,
    encode,
)
from warmline_common.protocol.sse import DONE, encode_comment, encode_event
from warmline_common.storage.home import Home


class FakeBackend:
    """Backend scripted by its attributes; `calls` lists the received calls by kind."""

    def __init__(self, home: Home, model: str = SERVED, fingerprint: str = "f" * 64) -> None:
        self.home, self.model, self.fingerprint = home, model, fingerprint
        self.boot, self.generation = "boot-1", 0
        self.ready = True
        self.pid = 1 << 30  # of no process
        self.steps, self.step_age_s = 100, 0.0
        self.prefill_tokens_s = 1.0  # reported in the status
        self.health_checks = 0
        self.advances_steps = False  # each health check advances a step
        self.reports_start = False  # generations report their start
        self.layout, self.kv_bytes = make_layout(), 0
        self.answer = ["Par", "is."]
        self.turn: SampledTurn | None = None  # each answer's sampled turn
        self.logprob = -0.25  # of every request's first token
        self.cold_logprobs: list[float] = []  # one per correct background generation; then `logprob`
        self.correct_until = 0  # a background generation that reuses at most this is correct
        self.save_failures: list[int] = []  # HTTP statuses, one per save
        self.drop_failures = 0  # failures of resident deletions
        self.background_cancels = 0  # background generations to cancel
        self.background_allowed = asyncio.Event()
        self.background_allowed.set()
        self.residents: dict[str, bytes] = {}  # residents: packed tokens
        self.roots: dict[str, bytes] = {}  # namespaces
        self.resident_by_request: dict[str, str] = {}  # resident by request id
        self.checkpoints: dict[str, list[int]] = {}
        self.calls: defaultdict[str, list[Any]] = defaultdict(list)
        self.raw: list[bytes] | None = None  # bytes of the stream, instead of the usual ones
        self.restore_refusals: list[str] = []  # reasons, one per restore; the last file is bad
        self.gone_count = 0  # generations to answer with 410
        # One per generation: "" none, "cut", "cut after content", or an error's code.
        self.generation_faults: list[str] = []
        # Chunks after which a generation waits for `may_continue` or its cancellation.
        self.hold_after: int | None = None
        self.may_continue = asyncio.Event()
        self.holding = asyncio.Event()
        self.restoring_allowed = asyncio.Event()
        self.restoring_allowed.set()
        self.saving_allowed = asyncio.Event()
        self.saving_allowed.set()
        self.texts_allowed = asyncio.Event()
        self.texts_allowed.set()
        self.listing_allowed = asyncio.Event()
        self.listing_allowed.set()
        self._prompts_by_id: dict[str, dict[str, Any]] = {}
        self._running: dict[str, asyncio.Event] = {}
        self._results: dict[str, asyncio.Future[GenerationResult]] = {}
        self._call_recorded = asyncio.Event()
        self._count = 0

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/kv/status", self._status)
        app.router.add_post("/kv/prompts", self._prompts)
        app.router.add_post("/kv/restore", self._restore)
        app.router.add_post("/kv/save", self._save)
        app.router.add_get("/kv/residents", self._residents)
        app.router.add_delete("/kv/residents/{id}", self._drop)
        app.router.add_put("/kv/residents/order", self._order)
        app.router.add_post("/kv/forget", self._forget)
        app.router.add_post("/kv/texts", self._texts)
        app.router.add_delete("/requests/{id}", self._cancel)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        return app

    def restart(self) -> None:
        """Simulate a killed process: a new boot without residents."""
        self.residents.clear()
        self.boot = f"boot-{int(self.boot[5:]) + 1}"

    def _record_call(self, kind: str, call: Any) -> None:
        self.calls[kind].append(call)
        self._call_recorded.set()

    async def wait_for_calls(self, kind: str, count: int = 1) -> None:
        """Wait until there were `count` calls of this kind."""
        while len(self.calls[kind]) < count:
            self._call_recorded.clear()
            await self._call_recorded.wait()

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def _make_id(self, kind: str) -> str:
        self._count += 1
        return f"{kind}-{self._count}"

    def _reply(self, message: Reply | GenerationResult, status: int = 200) -> web.Response:
        return web.Response(body=encode(message), status=status, content_type="application/json")

    def _error(self, status: int, message: str) -> web.Response:
        return web.Response(
            body=encode(ErrorReply(error=ErrorBody(message=message))), status=status, content_type="application/json"
        )

    @property
    def _snapshot(self) -> dict[str, Any]:
        return {"boot": self.boot, "generation": self.generation}

    async def _status(self, request: web.Request) -> web.Response:
        return self._reply(
            BackendStatus(
                **self._snapshot,
                ready=self.ready,
                model=self.model,
                model_path="/none",
                fingerprint=self.fingerprint,
                layout=self.layout,
                context_tokens_max=100_000,
                memory_budget_bytes=10**9,
                resident_bytes=0,
                running_bytes=0,
                residents=len(self.residents),
                running=len(self._running),
                queued=0,
                prefill_rates=[PrefillRate(tokens=1000, tokens_per_s=self.prefill_tokens_s)],
                chunk_durations=make_chunk_durations(self.prefill_tokens_s),
                decode_tokens_per_s=10.0,
                restore_bytes_per_s=1e9,
                save_bytes_per_s=1e9,
                slowest_recent_step_s=0.1,
                prefill_step_size=512,
                model_created=1_700_000_000,
            )
        )

    async def _health(self, request: web.Request) -> web.Response:
        self.health_checks += 1
        self.steps += self.advances_steps
        return web.Response(
            body=encode(
                HealthReply(
                    boot=self.boot,
                    pid=self.pid,
                    ready=self.ready,
                    busy=bool(self._running) or self.step_age_s > 0,
                    steps=self.steps,
                    step_age_s=self.step_age_s,
                    slowest_recent_step_s=0.0,
                    failure="" if self.ready else "the model is still loading",
                )
            )
        )

    async def _ready(self, request: web.Request) -> web.Response:
        if self.ready:
            return web.json_response({"ready": True, "reason": ""})
        return web.json_response({"ready": False, "reason": "the model is still loading"}, status=503)

    async def _prompts(self, request: web.Request) -> web.Response:
        message = decode(await request.read(), PromptRequest)
        self._record_call("prompts", message.body)
        self._record_call("turns", message.turns)
        if message.body.get("prompt") == "bad":
            return self._error(400, "'prompt' is bad")
        if "stop" in message.body and not isinstance(message.body["stop"], str):
            return self._error(400, "'stop' must be a string")
        text, ends = render_prompt(message.body)
        prompt_id = self._make_id("prompt")
        self._prompts_by_id[prompt_id] = message.body
        return self._reply(
            PromptReply(
                **self._snapshot,
                prompt_id=prompt_id,
                tokens=pack_text(text),
                boundaries=ends,
                turn_end=ends[-1] if ends else 0,
                tokens_max=100,
                kv_bytes=self.kv_bytes,
                fingerprint=self.fingerprint,
            )
        )

    async def _restore(self, request: web.Request) -> web.Response:
        message = decode(await request.read(), RestoreRequest)
        self._record_call("restore", message)
        self._running[message.request_id] = given_up = asyncio.Event()
        allowed = asyncio.ensure_future(self.restoring_allowed.wait())
        await asyncio.wait([allowed, asyncio.ensure_future(given_up.wait())], return_when=asyncio.FIRST_COMPLETED)
        del self._running[message.request_id]
        if given_up.is_set():
            return self._error(499, "cancelled")
        if self.restore_refusals:
            link = message.chain[-1]
            return self._reply(
                RestoreRefusal(
                    **self._snapshot,
                    reason=self.restore_refusals.pop(0),
                    bad=link.id,
                    good_prefix=link.start,
                    detail="as scripted",
                ),
                409,
            )
        resident = self._make_id("restored")
        self.residents[resident], self.roots[resident] = message.tokens, message.root
        return self._reply(
            RestoreReply(
                **self._snapshot, resident=resident, position=len(message.tokens) // 4, bytes_read=1, seconds=0.01
            )
        )

    async def _save(self, request: web.Request) -> web.Response:
        message = decode(await request.read(), SaveRequest)
        self._record_call("save", message)
        await self.saving_allowed.wait()
        if self.save_failures:
            return self._error(self.save_failures.pop(0), "as scripted")
        if message.resident not in self.residents:
            return self._error(410, "gone")
        return self._reply(
            SaveReply(
                **self._snapshot,
                segments=[self._write(each.id) for each in message.segments],
                checkpoints=[self._write(each.id) for each in message.checkpoints],
                seconds=0.01,
            )
        )

    def _write(self, file_id: str) -> SavedFile:
        path = self.home.segment_file(file_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"rows")
        return SavedFile(id=file_id, bytes_written=4, checksum="0" * 16)

    async def _residents(self, request: web.Request) -> web.Response:
        self._record_call("residents", request.query_string)
        await self.listing_allowed.wait()
        ids = request.query.get("ids", "")
        wanted, with_ids = set(ids.split(",")) if ids not in ("", "1") else None, bool(ids)
        return self._reply(
            ResidentsReply(
                **self._snapshot,
                residents=[
                    Resident(
                        id=name,
                        tokens=len(ids) // 4,
                        positions=self.checkpoints.get(name, []),
                        bytes_held=1,
                        last_used=0.0,
                        ids=ids if with_ids else None,
                        root=self.roots.get(name, b""),
                    )
                    for name, ids in self.residents.items()
                    if wanted is None or name in wanted
                ],
            )
        )

    async def _forget(self, request: web.Request) -> web.Response:
        body = await request.read()
        keep = decode(body, ClearCacheRequest).keep if body else []
        self._record_call("forget", keep)
        kept_ids = {*keep, *(self.resident_by_request.get(each, "") for each in keep)}
        self.residents = {resident: tokens for resident, tokens in self.residents.items() if resident in kept_ids}
        return web.json_response({})

    async def _texts(self, _: web.Request) -> web.Response:
        """404: the fake has no tokenizer."""
        self._record_call("texts", "")
        await self.texts_allowed.wait()
        return self._error(404, "no texts here")

    async def _order(self, request: web.Request) -> web.Response:
        self._record_call("order", decode(await request.read(), EvictionOrder).drop_first)
        return web.json_response({})

    async def _drop(self, request: web.Request) -> web.Response:
        self._record_call("drop", request.match_info["id"])
        if self.drop_failures:
            self.drop_failures -= 1
            return self._error(500, "as scripted")
        self.residents.pop(request.match_info["id"], None)
        return self._reply(Reply(**self._snapshot))

    async def _cancel(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        if request.query.get("finish") == "prefill":
            self._record_call("finish", request_id)
            return web.json_response({}, status=202)
        self._record_call("cancel", request_id)
        if request_id not in self._running:
            return self._error(404, "unknown request")
        self._running[request_id].set()
        if request_id not in self._results:
            return self._error(404, "given up")
        return self._reply(await self._results[request_id])

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, headers = self._prompts_by_id[request.headers[HEADER_PROMPT]], request.headers
        self._record_call("generate", headers.copy())
        if self.gone_count:
            self.gone_count -= 1
            return self._error(410, "resident is gone")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.generation_faults and (mishap := self.generation_faults.pop(0)):
            await self._fail(mishap, request, response, body)
            return response
        if (raw := self.raw) is not None:
            for data in raw:
                await response.write(data)
            if request.transport and raw[-1:] != [b"data: [DONE]\n\n"]:
                request.transport.abort()
            return response
        await self._stream(response, body, headers)
        return response

    async def _fail(
        self, mishap: str, request: web.Request, response: web.StreamResponse, body: dict[str, Any]
    ) -> None:
        await response.write(encode_comment("started"))
        if mishap == "cut after content":
            await response.write(encode_event(json.dumps(make_chunk(body, "Par")).encode()))
        if mishap.startswith("cut"):
            assert request.transport is not None
            request.transport.abort()
            return
        error = ErrorReply(error=ErrorBody(message="as scripted", type="server_error", code=mishap))
        await response.write(encode_event(encode(error)))

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], headers: Any) -> None:
        request_id, reuse = headers[HEADER_REQUEST], int(headers.get(HEADER_REUSE, 0))
        background = HEADER_BACKGROUND in headers
        self._running[request_id] = cancelled = asyncio.Event()
        self._results[request_id] = asyncio.get_running_loop().create_future()
        taken = self.residents.get(headers.get(HEADER_RESIDENT, ""), b"")
        if len(taken) // 4 == reuse:
            self.residents.pop(headers.get(HEADER_RESIDENT, ""), None)
        prompt, generated = render_prompt(body)[0], b""
        try:
            if self.reports_start:
                await response.write(encode_comment("started"))
            await response.write(encode_comment(f"prefill {reuse}/{len(prompt)}"))
            if background:
                await self.background_allowed.wait()
            if background and self.background_cancels:
                self.background_cancels -= 1
                cancelled.set()
            for number, text in enumerate(self.answer[: 1 if background else None]):
                if number == self.hold_after:
                    self.holding.set()
                    await asyncio.wait(
                        [asyncio.ensure_future(self.may_continue.wait()), asyncio.ensure_future(cancelled.wait())],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                if cancelled.is_set():
                    break
                generated += text.encode()
                await response.write(encode_event(json.dumps(make_chunk(body, text)).encode()))
        except (ConnectionError, asyncio.CancelledError):  # the proxy closed the stream; its cancel awaits the result
            cancelled.set()
        settled = self._finish(request_id, prompt, generated, reuse, headers, cancelled.is_set())
        del self._running[request_id]
        self._results[request_id].set_result(settled)
        if not cancelled.is_set():
            await response.write(encode_event(json.dumps(make_chunk(body, "", "stop")).encode()))
            await response.write(
                encode_event(json.dumps(make_usage_chunk(len(prompt), len(generated), reuse)).encode())
            )
            await response.write(DONE)
        await response.write(encode_event(encode(settled), RESULT_EVENT))

    def _finish(
        self, request_id: str, prompt: bytes, generated: bytes, reuse: int, headers: Any, cancelled: bool
    ) -> GenerationResult:
        resident = "" if (background := HEADER_BACKGROUND in headers) else self._make_id("resident")
        right = background and reuse <= self.correct_until
        logprob = self.cold_logprobs.pop(0) if right and self.cold_logprobs else self.logprob
        if resident:
            self.residents[resident], self.resident_by_request[request_id] = pack_text(prompt + generated), resident
            self.roots[resident] = bytes.fromhex(headers[HEADER_ROOT])
        at = [int(position) for position in headers.get(HEADER_CHECKPOINTS, "").split(",") if position]
        self.checkpoints[resident] = [*at, len(prompt + generated)] if self.layout.has_states else []
        return GenerationResult(
            **self._snapshot,
            request_id=request_id,
            finish="cancelled" if cancelled else "stop",
            resident=resident,
            generated=pack_text(generated),
            prefilled_until=len(prompt + generated),
            checkpoints=self.checkpoints[resident],
            positions=self.checkpoints[resident],
            timings=make_timings(len(prompt) - reuse, len(generated), self.prefill_tokens_s),
            first=make_first_logits(logprob) if generated else None,
            turn=self.turn,
        )
