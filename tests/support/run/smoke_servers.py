"""Small servers of OpenAI's API for the gates: a correct one, and subclasses with one fault each.

The "model" answers with words chosen by a hash of the prompt, one token each, and remembers its conversations.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

WORDS = ("ash", "birch", "cedar", "elm", "fir", "larch", "maple", "oak", "pine", "rowan", "willow", "yew")
SERVED = "honest-model"
LONG_TOKENS = 1200  # from here on a prompt takes its time
CHUNK_TOKENS = 400
GOOD_CALL = {"path": "/etc/hostname", "count": 3, "numbered": False}


class HonestServer:
    """Server that passes all gates.  Event loop; faulty servers override methods without an underscore."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # computed tokens of each conversation
        self.running = 0

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/ready", self.ready)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    # ---- parts of answers

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": SERVED, "object": "model"}]})

    async def ready(self, _: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    def make_model_name(self, body: dict[str, Any]) -> str:
        return str(body["model"])

    def make_words(self, body: dict[str, Any], cached: int) -> list[str]:
        digest = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
        count = min(int(body["max_tokens"]), 24)
        return [WORDS[digest[at % 32] % len(WORDS)] for at in range(count)]

    def make_content(self, text: str) -> str:
        return text

    def make_arguments(self) -> dict[str, Any]:
        return GOOD_CALL

    def make_calls(self) -> list[dict[str, Any]]:
        function = {"name": "read_lines", "arguments": json.dumps(self.make_arguments())}
        return [{"id": "call_1", "type": "function", "function": function}]

    def make_formatted(self, body: dict[str, Any]) -> str | None:
        """Make an answer that the response_format allows; None without a format."""
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
        return json.dumps({"answer": schema["properties"]["answer"]["enum"][0]}) if schema else None

    def count_reusable(self, body: dict[str, Any]) -> int:
        """Count the prompt's cached tokens."""
        if body.get("cache_prompt") is False:
            return 0
        messages = body["messages"]
        known = (self._seen.get(json.dumps(messages[:count]), 0) for count in range(len(messages), 0, -1))
        return min(next((tokens for tokens in known if tokens), 0), count_tokens(messages) - 1)

    def remember(self, body: dict[str, Any], tokens: int) -> None:
        self._seen[json.dumps(body["messages"])] = tokens

    async def wait_for_other_work(self, body: dict[str, Any]) -> None:
        """Wait before a short prompt is computed; here for nothing."""

    async def prefill(self, body: dict[str, Any], cached: int, response: web.StreamResponse | None) -> None:
        """Compute the prompt; a long uncached one stops after its first chunk until its client disconnects."""
        if count_tokens(body["messages"]) < LONG_TOKENS or cached or response is None:
            return await self.wait_for_other_work(body)
        self.remember(body, CHUNK_TOKENS)
        await response.write(f": prefill {CHUNK_TOKENS}/{count_tokens(body['messages'])}\n\n".encode())
        await asyncio.Event().wait()

    def make_stream_end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def make_usage_chunks(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"choices": [], "usage": usage}]

    # ---- requests

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        cached = self.count_reusable(body)
        if not body.get("stream"):
            await self.prefill(body, cached, None)
            return web.json_response(self._whole(body, cached))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.prefill(body, cached, response)
        for chunk in self._chunks(self._whole(body, cached)):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(self.make_stream_end())
        return response

    def _whole(self, body: dict[str, Any], cached: int) -> dict[str, Any]:
        words = self.make_words(body, cached)
        formed, calling = self.make_formatted(body), body.get("tool_choice") == "required"
        text = formed if formed is not None else self.make_content(" ".join(words))
        message: dict[str, Any] = {"role": "assistant", "content": None if calling else text}
        if calling:
            message["tool_calls"] = self.make_calls()
        tokens = [] if calling or formed is not None else [make_logprob(word) for word in words]
        prompt = count_tokens(body["messages"])
        self.remember(body, prompt)
        for word in body.get("stop", []):
            message["content"] = str(message["content"]).partition(word)[0]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": tokens} if body.get("logprobs") else None,
            "finish_reason": "tool_calls" if calling else "stop" if formed is not None else "length",
        }
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return {"id": "1", "model": self.make_model_name(body), "choices": [choice], "usage": usage}

    def _chunks(self, whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
        choice, head = whole["choices"][0], {"id": whole["id"], "model": whole["model"]}
        message = choice["message"]
        delta: dict[str, Any] = {"content": message["content"]}
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": choice["logprobs"]}]}
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
        for chunk in self.make_usage_chunks(whole["usage"]):
            yield {**head, **chunk}


def count_tokens(messages: list[dict[str, Any]]) -> int:
    return len(json.dumps(messages)) // 4


def make_logprob(word: str) -> dict[str, Any]:
    """Make the log-probabilities of a word with probability 0.9 and two others with 0.03."""
    others = [other for other in WORDS if other != word][:2]
    top = [{"token": word, "logprob": math.log(0.9)}, *({"token": each, "logprob": math.log(0.03)} for each in others)]
    return {"token": word, "logprob": math.log(0.9), "top_logprobs": top}


class LeaksEndToken(HonestServer):
    """Server that sends the end-of-turn token as text."""

    def make_content(self, text: str) -> str:
        return text + "<|im_end|>"


class LeaksReasoning(HonestServer):
    """Server whose content begins with the end of the reasoning."""

    def make_content(self, text: str) -> str:
        return "Well. </think>" + text


class IgnoresModelName(HonestServer):
    """Server that answers any model name, but under its own name."""

    def make_model_name(self, body: dict[str, Any]) -> str:
        return SERVED


class RejectsOtherNames(HonestServer):
    """Server that refuses model names other than its own."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if (name := (await request.json())["model"]) != SERVED:
            return web.json_response({"error": {"message": f"model {name} not found"}}, status=404)
        return await super().chat(request)


class SendsNoCalls(HonestServer):
    """Server whose tool call answer has finish_reason "tool_calls" and no calls."""

    def make_calls(self) -> list[dict[str, Any]]:
        return []


class SendsNumberAsString(HonestServer):
    """Server whose tool call has a number argument as a string."""

    def make_arguments(self) -> dict[str, Any]:
        return {**GOOD_CALL, "count": "3"}


class IgnoresResponseFormat(HonestServer):
    """Server that ignores response_format."""

    def make_formatted(self, body: dict[str, Any]) -> str | None:
        return None


class RefusesResponseFormat(HonestServer):
    """Server that refuses requests with response_format."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if "response_format" in await request.json():
            return web.json_response({"error": {"message": "no forms here"}}, status=400)
        return await super().chat(request)


class AnswersAtRandom(HonestServer):
    """Server whose answers to one prompt differ from request to request."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def make_words(self, body: dict[str, Any], cached: int) -> list[str]:
        self._count += 1
        return super().make_words({**body, "messages": [*body["messages"], self._count]}, cached)


class GarbageAfterTurns(HonestServer):
    """Server whose warm answers turn to garbage after some turns, with HTTP 200; short requests are right."""

    TURNS_RIGHT = 3

    def make_words(self, body: dict[str, Any], cached: int) -> list[str]:
        rotten = cached and len(body["messages"]) > 2 * self.TURNS_RIGHT
        return ["!"] * 24 if rotten else super().make_words(body, cached)


class WrongWordAfterTurns(GarbageAfterTurns):
    """Server whose warm answers have one wrong word after some turns."""

    def make_words(self, body: dict[str, Any], cached: int) -> list[str]:
        right = HonestServer.make_words(self, body, cached)
        rotten = cached and len(body["messages"]) > 2 * self.TURNS_RIGHT and len(right) > 20
        return [*right[:20], "yew" if right[20] != "yew" else "oak", *right[21:]] if rotten else right


class IgnoresCachePrompt(HonestServer):
    """Server that reuses its cache even for requests with cache_prompt false."""

    def count_reusable(self, body: dict[str, Any]) -> int:
        return super().count_reusable({**body, "cache_prompt": True})


class CachesNothing(HonestServer):
    """Server without a prefix cache."""

    def count_reusable(self, body: dict[str, Any]) -> int:
        return 0

    async def prefill(self, body: dict[str, Any], cached: int, response: web.StreamResponse | None) -> None:
        """Stop once per conversation until the client disconnects."""
        known = len(self._seen)
        self.remember(body, 1)
        if len(self._seen) > known:
            await super().prefill(body, cached, response)


class CachesFirstTurnOnly(HonestServer):
    """Server that caches only the first turn of a conversation."""

    def remember(self, body: dict[str, Any], tokens: int) -> None:
        if len(body["messages"]) == 1:
            super().remember(body, tokens)


class CachesWholeSteps(HonestServer):
    """Server that caches multiples of its prefill step, as exact mode does."""

    STEP_TOKENS = 256

    def count_reusable(self, body: dict[str, Any]) -> int:
        tokens = super().count_reusable(body)
        return tokens - tokens % self.STEP_TOKENS


class NeverAnswers(HonestServer):
    """Server that accepts requests and never answers."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError


class OmitsDone(HonestServer):
    """Server whose streams end without [DONE]."""

    def make_stream_end(self) -> bytes:
        return b""


class OmitsUsage(HonestServer):
    """Server whose streams have no usage."""

    def make_usage_chunks(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return []


class BreaksStreams(HonestServer):
    """Server that aborts the connections of streams before their end."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return await super().chat(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"model": "m", "choices": []}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response


class SwapsAnswers(HonestServer):
    """Server that gives three concurrent requests each other's answers."""

    def __init__(self) -> None:
        super().__init__()
        self._together: list[dict[str, Any]] = []
        self._full = asyncio.Event()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "together" not in json.dumps(body) or self._full.is_set():
            return await super().chat(request)
        place = len(self._together)
        self._together.append(body)
        if len(self._together) == 3:
            self._full.set()
        await self._full.wait()
        return web.json_response(self._whole(self._together[(place + 1) % 3], 0))


class ServesOneAtATime(HonestServer):
    """Server whose small requests wait until a long prompt is computed whole."""

    def __init__(self) -> None:
        super().__init__()
        self._busy, self._waiting = False, asyncio.Event()
        self._done = asyncio.Event()

    async def wait_for_other_work(self, body: dict[str, Any]) -> None:
        if self._busy:
            self._waiting.set()
            await self._done.wait()

    async def prefill(self, body: dict[str, Any], cached: int, response: web.StreamResponse | None) -> None:
        if count_tokens(body["messages"]) < LONG_TOKENS or cached or response is None:
            return await self.wait_for_other_work(body)
        self._busy = True
        await response.write(f": prefill {CHUNK_TOKENS}/{count_tokens(body['messages'])}\n\n".encode())
        await self._waiting.wait()

    def make_stream_end(self) -> bytes:
        self._done.set()
        self._busy = False
        return super().make_stream_end()


class NeverReady(HonestServer):
    """Server whose model is never loaded."""

    async def ready(self, _: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "the model is being loaded"}}, status=503)


class RequiresKey(HonestServer):
    """Server that requires a key."""

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer open":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return await super().models(request)


@asynccontextmanager
async def run_server(server: HonestServer) -> AsyncIterator[str]:
    """Run the server on this event loop; yields its URL."""
    runner = web.AppRunner(server.make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
