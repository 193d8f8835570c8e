"""Small servers of OpenAI's API for the gates: one that is right, and one for each way to be wrong.

The "model" says words that its prompt decides, a token each, and remembers which conversations it has seen.
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
    """Right in all that gates ask.  Event loop; methods without an underscore are what wrong servers do otherwise."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # conversations, and how many of their tokens were computed
        self.running = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/ready", self.ready)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    # ---- what is said

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": SERVED, "object": "model"}]})

    async def ready(self, _: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    def name(self, body: dict[str, Any]) -> str:
        return str(body["model"])

    def words(self, body: dict[str, Any], cached: int) -> list[str]:
        digest = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
        count = min(int(body["max_tokens"]), 24)
        return [WORDS[digest[at % 32] % len(WORDS)] for at in range(count)]

    def content(self, text: str) -> str:
        return text

    def arguments(self) -> dict[str, Any]:
        return GOOD_CALL

    def calls(self) -> list[dict[str, Any]]:
        function = {"name": "read_lines", "arguments": json.dumps(self.arguments())}
        return [{"id": "call_1", "type": "function", "function": function}]

    def formed(self, body: dict[str, Any]) -> str | None:
        """Answers that a response_format allows."""
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
        return json.dumps({"answer": schema["properties"]["answer"]["enum"][0]}) if schema else None

    def reusable(self, body: dict[str, Any]) -> int:
        """Number of the prompt's tokens that need not be computed."""
        if body.get("cache_prompt") is False:
            return 0
        messages = body["messages"]
        known = (self._seen.get(json.dumps(messages[:count]), 0) for count in range(len(messages), 0, -1))
        return min(next((tokens for tokens in known if tokens), 0), tokens_of(messages) - 1)

    def remember(self, body: dict[str, Any], tokens: int) -> None:
        self._seen[json.dumps(body["messages"])] = tokens

    async def other_work(self, body: dict[str, Any]) -> None:
        """Before a short prompt is computed."""

    async def prefill(self, body: dict[str, Any], cached: int, response: web.StreamResponse | None) -> None:
        """A long prompt that is not known stops after its first chunk, until its client leaves."""
        if tokens_of(body["messages"]) < LONG_TOKENS or cached or response is None:
            return await self.other_work(body)
        self.remember(body, CHUNK_TOKENS)
        await response.write(f": prefill {CHUNK_TOKENS}/{tokens_of(body['messages'])}\n\n".encode())
        await asyncio.Event().wait()

    def ending(self) -> bytes:
        return b"data: [DONE]\n\n"

    def stream_usage(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"choices": [], "usage": usage}]

    # ---- how

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        cached = self.reusable(body)
        if not body.get("stream"):
            await self.prefill(body, cached, None)
            return web.json_response(self._whole(body, cached))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.prefill(body, cached, response)
        for chunk in self._chunks(self._whole(body, cached)):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(self.ending())
        return response

    def _whole(self, body: dict[str, Any], cached: int) -> dict[str, Any]:
        words = self.words(body, cached)
        formed, calling = self.formed(body), body.get("tool_choice") == "required"
        text = formed if formed is not None else self.content(" ".join(words))
        message: dict[str, Any] = {"role": "assistant", "content": None if calling else text}
        if calling:
            message["tool_calls"] = self.calls()
        tokens = [] if calling or formed is not None else [logprob_of(word) for word in words]
        prompt = tokens_of(body["messages"])
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
        return {"id": "1", "model": self.name(body), "choices": [choice], "usage": usage}

    def _chunks(self, whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
        choice, head = whole["choices"][0], {"id": whole["id"], "model": whole["model"]}
        message = choice["message"]
        delta: dict[str, Any] = {"content": message["content"]}
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": choice["logprobs"]}]}
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
        for chunk in self.stream_usage(whole["usage"]):
            yield {**head, **chunk}


def tokens_of(messages: list[dict[str, Any]]) -> int:
    return len(json.dumps(messages)) // 4


def logprob_of(word: str) -> dict[str, Any]:
    """Certain of itself: 0.9, and two others far behind."""
    others = [other for other in WORDS if other != word][:2]
    top = [{"token": word, "logprob": math.log(0.9)}, *({"token": each, "logprob": math.log(0.03)} for each in others)]
    return {"token": word, "logprob": math.log(0.9), "top_logprobs": top}


class Leaks(HonestServer):
    """The end of a turn is sent as text."""

    def content(self, text: str) -> str:
        return text + "<|im_end|>"


class LeaksThoughts(HonestServer):
    """The reasoning's end stands where the answer begins."""

    def content(self, text: str) -> str:
        return "Well. </think>" + text


class OwnName(HonestServer):
    """Serves every name, and calls itself by its own."""

    def name(self, body: dict[str, Any]) -> str:
        return SERVED


class OneName(HonestServer):
    """Serves its own name alone."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if (name := (await request.json())["model"]) != SERVED:
            return web.json_response({"error": {"message": f"model {name} not found"}}, status=404)
        return await super().chat(request)


class EmptyCalls(HonestServer):
    """Says that there is a call where there is none."""

    def calls(self) -> list[dict[str, Any]]:
        return []


class LooseArguments(HonestServer):
    """A number comes as text."""

    def arguments(self) -> dict[str, Any]:
        return {**GOOD_CALL, "count": "3"}


class IgnoresForm(HonestServer):
    """Answers what it likes, whatever response_format says."""

    def formed(self, body: dict[str, Any]) -> str | None:
        return None


class RefusesForm(HonestServer):
    """Can't hold answers to a form, and says so."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if "response_format" in await request.json():
            return web.json_response({"error": {"message": "no forms here"}}, status=400)
        return await super().chat(request)


class Moody(HonestServer):
    """Never says the same again."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def words(self, body: dict[str, Any], cached: int) -> list[str]:
        self._count += 1
        return super().words({**body, "messages": [*body["messages"], self._count]}, cached)


class RotsWithLength(HonestServer):
    """Server whose warm answers turn to garbage after some turns, with HTTP 200; short requests are right."""

    TURNS_RIGHT = 3

    def words(self, body: dict[str, Any], cached: int) -> list[str]:
        rotten = cached and len(body["messages"]) > 2 * self.TURNS_RIGHT
        return ["!"] * 24 if rotten else super().words(body, cached)


class RotsQuietly(RotsWithLength):
    """Its garbage reads well: one word is another one, from some place on."""

    def words(self, body: dict[str, Any], cached: int) -> list[str]:
        right = HonestServer.words(self, body, cached)
        rotten = cached and len(body["messages"]) > 2 * self.TURNS_RIGHT and len(right) > 20
        return [*right[:20], "yew" if right[20] != "yew" else "oak", *right[21:]] if rotten else right


class NeverCold(HonestServer):
    """Takes no notice of cache_prompt."""

    def reusable(self, body: dict[str, Any]) -> int:
        return super().reusable({**body, "cache_prompt": True})


class KeepsNothing(HonestServer):
    """Computes everything anew."""

    def reusable(self, body: dict[str, Any]) -> int:
        return 0

    async def prefill(self, body: dict[str, Any], cached: int, response: web.StreamResponse | None) -> None:
        """Waits for its client to leave once."""
        known = len(self._seen)
        self.remember(body, 1)
        if len(self._seen) > known:
            await super().prefill(body, cached, response)


class ForgetsTheNewest(HonestServer):
    """Never gets further than a conversation's first turn."""

    def remember(self, body: dict[str, Any], tokens: int) -> None:
        if len(body["messages"]) == 1:
            super().remember(body, tokens)


class KeepsOnAGrid(HonestServer):
    """As exact mode does: what is kept ends at a multiple of its step."""

    STEP_TOKENS = 256

    def reusable(self, body: dict[str, Any]) -> int:
        tokens = super().reusable(body)
        return tokens - tokens % self.STEP_TOKENS


class Hangs(HonestServer):
    """Takes questions and never answers."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError


class NoDone(HonestServer):
    """Its streams just end."""

    def ending(self) -> bytes:
        return b""


class NoUsage(HonestServer):
    """Its streams don't count."""

    def stream_usage(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return []


class BreaksStreams(HonestServer):
    """Connections of streams break before the end."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return await super().chat(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"model": "m", "choices": []}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response


class Mixes(HonestServer):
    """Three that come together get each other's answers."""

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


class OneAtATime(HonestServer):
    """A small request waits until a long prompt is computed whole."""

    def __init__(self) -> None:
        super().__init__()
        self._busy, self._waiting = False, asyncio.Event()
        self._done = asyncio.Event()

    async def other_work(self, body: dict[str, Any]) -> None:
        if self._busy:
            self._waiting.set()
            await self._done.wait()

    async def prefill(self, body: dict[str, Any], cached: int, response: web.StreamResponse | None) -> None:
        if tokens_of(body["messages"]) < LONG_TOKENS or cached or response is None:
            return await self.other_work(body)
        self._busy = True
        await response.write(f": prefill {CHUNK_TOKENS}/{tokens_of(body['messages'])}\n\n".encode())
        await self._waiting.wait()

    def ending(self) -> bytes:
        self._done.set()
        self._busy = False
        return super().ending()


class Loading(HonestServer):
    """Its model is never loaded."""

    async def ready(self, _: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "the model is being loaded"}}, status=503)


class Keyed(HonestServer):
    """Wants a key."""

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer open":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return await super().models(request)


@asynccontextmanager
async def served(server: HonestServer) -> AsyncIterator[str]:
    """Its URL, on this loop."""
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
