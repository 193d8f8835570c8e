"""Answers: the JSON keys of all that a pair says, whole and streamed, to clients, to the owner and to its proxy."""

import base64
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

from surface_routes import AS_ADMIN, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from surface_servers import Answer, ask, open_response
from surface_shapes import Shape, events, shape

SETTLE_TIMEOUT_S = 60.0
POLL_S = 0.02
THINK_END = "259"  # of tiny_models' tokens; ends the reasoning at once, so that what is forced comes next
BLOCK_TOKENS = 64
SEEDED = {"seed": 1}  # the same answer at each run, with an event of each kind
LONG = "Words that fill some blocks of sixty-four tokens each, so that they are stored. " * 3
LONGER = "Words of a conversation of its own, which is restored. " * 30  # the quicker start on any machine
PARAMETERS = {
    "type": "object",
    "properties": {"where": {"enum": ["a", "b"]}},
    "required": ["where"],
    "additionalProperties": False,
}
FORM = {"name": "side", "schema": {"enum": ["left", "right"]}}
CONTENT_DELTA = re.compile(rb'\.delta"|"(?:reasoning_)?content": ?"[^"]')
SEGMENT_ID = "0123456789abcdef" * 2  # of a segment that is saved for the backend's own answers


@dataclass(frozen=True)
class Ports:
    """Ports of a running pair, with its secret."""

    proxy: int
    backend: int
    secret: str

    @property
    def as_owner(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    def settle(self) -> None:
        """Wait until nothing is under way and all is on disk."""
        limit = time.monotonic() + SETTLE_TIMEOUT_S
        while (status := ask(self.proxy, "GET", "/warmline/status").json)["lives"] or status["settling"]:
            assert time.monotonic() < limit, status
            time.sleep(POLL_S)


def client_answers(ports: Ports) -> dict[str, Any]:
    """Collect by request the shape of its answer, or of each kind of event of its stream."""
    shapes: dict[str, Any] = {}
    for name, (path, body) in _requests().items():
        shapes[name] = shape(_fine(ask(ports.proxy, "POST", path, body)).json)
        shapes[f"{name}, streamed"] = events(_fine(ask(ports.proxy, "POST", path, {**body, "stream": True})).body)
    for name, (method, path, body, headers) in _others().items():
        shapes[name] = shape(ask(ports.proxy, method, path, body, headers).json)
    return shapes


def _requests() -> dict[str, tuple[str, dict[str, Any]]]:
    function = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
    tool = {"type": "function", "function": function}
    forced = {"tools": [tool], "tool_choice": "required", "logit_bias": {THINK_END: 100}}
    formed = {"response_format": {"type": "json_schema", "json_schema": FORM}, "logit_bias": {THINK_END: 100}}
    used = {"tools": [{"name": "look", "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}}
    input_forced = {**forced, "tools": [{"type": "function", **function}]}
    input_formed = {"text": {"format": {"type": "json_schema", **FORM}}, "logit_bias": {THINK_END: 100}}
    usage = {"stream_options": {"include_usage": True}}
    return {
        "chat": (CHAT, _chat()),
        "chat, choices": (CHAT, _chat(n=2, logprobs=True, top_logprobs=2, max_tokens=40, **formed)),
        "chat, tools": (CHAT, _chat(max_tokens=40, **forced)),
        "chat, form": (CHAT, _chat(max_tokens=40, **formed)),
        "chat, usage": (CHAT, _chat(**usage)),
        "completion": (COMPLETIONS, {"model": "m", "prompt": "hi", "max_tokens": 4, "logprobs": 2, **SEEDED}),
        "messages": (MESSAGES, _chat(system="Be brief.")),
        "messages, tools": (MESSAGES, _chat(max_tokens=40, logit_bias={THINK_END: 100}, **used)),
        "responses": (RESPONSES, _input()),
        "responses, tools": (RESPONSES, _input(max_output_tokens=40, **input_forced)),
        "responses, form": (RESPONSES, _input(max_output_tokens=40, **input_formed)),
    }


def _chat(text: str = "hi", **options: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 6, **SEEDED, **options}


def _input(**options: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", "max_output_tokens": 6, **SEEDED, **options}


def _others() -> dict[str, tuple[str, str, Any, Mapping[str, str]]]:
    anthropic = {"anthropic-version": "2023-06-01"}
    return {
        "count_tokens": ("POST", f"{MESSAGES}/count_tokens", _chat(), {}),
        "input_tokens": ("POST", f"{RESPONSES}/input_tokens", {"model": "m", "input": "hi"}, {}),
        "models": ("GET", "/v1/models", None, {}),
        "model": ("GET", "/v1/models/any/name", None, {}),
        "models, Anthropic's": ("GET", "/v1/models", None, anthropic),
        "model, Anthropic's": ("GET", "/v1/models/any/name", None, anthropic),
        "health": ("GET", "/health", None, {}),
        "ready": ("GET", "/ready", None, {}),
        "error of chat": ("POST", CHAT, {}, {}),
        "error of messages": ("POST", MESSAGES, {}, {}),
        "error of responses": ("POST", RESPONSES, {}, {}),
        "error of a path": ("GET", "/nosuch", None, {}),
    }


def _fine(answer: Answer) -> Answer:
    assert answer.status == 200, answer
    return answer


# ---- requests that are stored, found again, and ended


def stored_requests(ports: Ports) -> dict[str, Any]:
    """Start of each of these requests, as its header says; shapes of cancelled and replaced ones."""
    collected: dict[str, Any] = {"cold": _source(ask(ports.proxy, "POST", CHAT, _chat(LONG)))}
    collected["resident"] = _source(ask(ports.proxy, "POST", CHAT, _chat(LONG)))
    ask(ports.proxy, "POST", CHAT, _chat(f"{LONG} But another one."), {"X-Session-Id": "talk"})
    ports.settle()
    collected["restored"] = _source(_restore(ports))
    ask(ports.proxy, "POST", CHAT, _chat(LONG, cache_prompt=False))
    for name, path, body in (("chat", CHAT, _chat("a")), ("responses", RESPONSES, _input(input="b"))):
        collected |= {f"{name}, {kind}": value for kind, value in _ended(ports, name, path, body).items()}
    ports.settle()
    return collected


def _source(answer: Answer) -> dict[str, Any]:
    return {"X-Warmline-Cache": answer.header("X-Warmline-Cache").split(" ")[0], "usage": shape(answer.json["usage"])}


def _restore(ports: Ports) -> Answer:
    ask(ports.proxy, "POST", CHAT, _chat(LONGER))
    ports.settle()
    for resident in ask(ports.backend, "GET", "/kv/residents", None, ports.as_owner).json["residents"]:
        ask(ports.backend, "DELETE", f"/kv/residents/{resident['id']}", None, ports.as_owner)
    return ask(ports.proxy, "POST", CHAT, _chat(LONGER))


def _read_until_content(response: HTTPResponse) -> bytes:
    """Read the stream up to its first delta of text."""
    lines = [response.readline()]
    while not CONTENT_DELTA.search(lines[-1]):
        lines.append(response.readline())
        assert lines[-1], "the stream ended without content"
    return b"".join(lines)


def _ended(ports: Ports, name: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send a stream, look at it once it has content, and let its client cancel it."""
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    with open_response(ports.proxy, "POST", path, {**body, length: 50_000, "stream": True}) as response:
        begin = _read_until_content(response)
        status = ask(ports.proxy, "GET", "/warmline/status").json
        request = response.headers["X-Warmline-Request"]
        state = ask(ports.proxy, "GET", f"/v1/requests/{request}")
        if path == RESPONSES:
            ending = ask(ports.proxy, "POST", f"{RESPONSES}/resp_{request}/cancel")
        else:
            ending = ask(ports.proxy, "DELETE", f"/v1/requests/{request}")
        stream = begin + response.read()
    live = {"live": shape(*status["live"]), "state": shape(state.json)}
    return {**live, "cancel": shape(ending.json), "events": events(stream)}


# ---- the owner


def owner_answers(ports: Ports, session: str, segment: str) -> dict[str, Shape]:
    queries = {
        "status": "",
        "requests": "?count=1000",
        "activity": "?count=200",
        "sessions": "?count=200",
        "sessions?q=": "?q=nosuch",
        "tree": "",
        "path": f"?session={session}",
        "path?segment=": f"?segment={segment}",
        "explain": "",
        "whose": "",
    }
    bodies: dict[str, Any] = {
        "texts": {"segment": segment, "sequences": [_tokens(b"hi")]},
        "pin": {"session": session},
        "purge": {"session": session, "dry_run": True},
        "gc": {},
        "repair": {},
        "replay": {"session": session},
    }
    roots = ask(ports.proxy, "GET", "/warmline/tree").json["nodes"]
    shapes = {f"GET {name}": _owner(ports, "GET", f"{name.split('?')[0]}{query}") for name, query in queries.items()}
    shapes["GET tree?parent="] = _owner(ports, "GET", f"tree?parent={roots[0]['id']}")
    shapes |= {f"POST {name}": _owner(ports, "POST", name, body) for name, body in bodies.items()}
    _owner(ports, "POST", "pin", {"session": session, "off": True})
    return shapes


def _owner(ports: Ports, method: str, name: str, body: Any = None) -> Shape:
    answer = ask(ports.proxy, method, f"/warmline/{name}", body, AS_ADMIN)
    return shape(_fine(answer).json)


def _tokens(text: bytes) -> str:
    """Ids as u32le in base64; a byte is a token."""
    return base64.b64encode(b"".join(byte.to_bytes(4, "little") for byte in text)).decode()


# ---- the backend


def backend_answers(ports: Ports) -> dict[str, Any]:
    """Collect answers of the backend to a holder of the secret."""

    def ask_backend(method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return ask(ports.backend, method, path, body, {**ports.as_owner, **headers})

    shapes: dict[str, Any] = {
        f"GET {path}": shape(ask_backend("GET", path).json)
        for path in ("/health", "/ready", "/kv/status", "/kv/residents", "/v1/models", "/v1/models/any/name")
    }
    shapes["chat"] = shape(ask_backend("POST", CHAT, _chat()).json)
    shapes["chat, streamed"] = events(ask_backend("POST", CHAT, _chat(stream=True)).body)
    named = {"X-Warmline-Request": "surface-1"}
    shapes["chat, settled"] = events(ask_backend("POST", CHAT, _chat(LONG, stream=True), **named).body)
    prompt = ask_backend("POST", "/kv/prompts", {"request_id": "a", "endpoint": "chat", "body": _chat(LONG)})
    shapes["prompts"] = shape(prompt.json)
    shapes["texts"] = shape(ask_backend("POST", "/kv/texts", {"sequences": [_tokens(b"hi")]}).json)
    shapes["forget"] = shape(ask_backend("POST", "/kv/forget", {}).json)
    return shapes


def transfers(ports: Ports) -> dict[str, Any]:
    """Save, restore and miss a segment, as the proxy does."""
    headers = {**ports.as_owner, "X-Warmline-Request": "surface-2"}
    events_of_save = ask(ports.backend, "POST", CHAT, _chat(LONG, stream=True), headers).body
    settled = json.loads(events_of_save.split(b"event: warmline\ndata: ")[1].split(b"\n")[0])
    ids = ask(ports.backend, "GET", "/kv/residents?ids=1", None, ports.as_owner).json["residents"]
    tokens = next(each["ids"] for each in ids if each["id"] == settled["resident"])
    segment = {"id": SEGMENT_ID, "start": 0, "end": BLOCK_TOKENS}
    save = {"request_id": "surface-3", "resident": settled["resident"], "segments": [segment]}
    first = base64.b64encode(base64.b64decode(tokens)[: 4 * BLOCK_TOKENS]).decode()
    restore = {"request_id": "surface-4", "tokens": first, "chain": [{**segment, "upto": BLOCK_TOKENS}]}
    missing = {**restore, "chain": [{**segment, "id": SEGMENT_ID[::-1], "upto": BLOCK_TOKENS}]}

    def post(path: str, body: Any) -> dict[str, Any]:
        answer = ask(ports.backend, "POST", path, body, ports.as_owner)
        return {"status": answer.status, "keys": shape(answer.json)}

    return {
        "residents with ids": shape(ids),
        "save": post("/kv/save", save),
        "restore": post("/kv/restore", restore),
        "restore of a missing file": post("/kv/restore", missing),
    }
