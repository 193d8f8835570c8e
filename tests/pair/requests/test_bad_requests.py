"""Bad requests get a right answer or a clear refusal in OpenAI's shape; the next request still works."""

import gzip
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.pair.pair import Message, Pair, Reply

MESSAGES: list[Message] = [{"role": "user", "content": "Are you well?"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES_PATH = "/v1/responses", "/v1/messages"
CONTEXT_TOKENS = 100_000  # of the tiny models
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


ODD_SCHEMA = {"type": "object", "properties": {"a": {"type": "any"}}}
ODD_TOOLS = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": ODD_SCHEMA, "strict": True}]


def make_body(**fields: object) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, "max_tokens": 4, **fields}


def make_prompt_body(**fields: object) -> dict[str, Any]:
    return {"model": "m", "prompt": "Are you well?", "max_tokens": 4, **fields}


def make_literal_body(name: str, value: str) -> bytes:
    """Make a body with a JSON literal that Python would not write."""
    return json.dumps(make_body(**{name: "HERE"})).replace('"HERE"', value).encode()


# name: (path, body, the param that is named, a word of the message)
REFUSED: dict[str, tuple[str, object, str | None, str]] = {
    "no JSON": (CHAT, b"messages=hello", None, "JSON"),
    "half a JSON": (CHAT, b'{"messages": [', None, "after 14 bytes"),
    "no UTF-8": (CHAT, b'{"messages": "\xff"}', None, "by byte 14 (0xff)"),
    "a JSON array": (CHAT, [make_body()], None, "JSON object"),
    "a JSON number": (COMPLETIONS, 7, None, "JSON object"),
    "an empty body": (CHAT, b"", None, "JSON"),
    "nested beyond reason": (CHAT, make_literal_body("x", "[" * 100_000 + "]" * 100_000), None, "JSON"),
    "stop: [5]": (CHAT, make_body(stop=[5]), "stop", "string"),
    "an empty stop word": (CHAT, make_body(stop=[""]), "stop", "empty"),
    "0 max_tokens": (CHAT, make_body(max_tokens=0), "max_tokens", "at least 1"),
    "negative max_tokens": (COMPLETIONS, make_prompt_body(max_tokens=-3), "max_tokens", "at least 1"),
    "0 max_completion_tokens": (CHAT, make_body(max_completion_tokens=0), "max_completion_tokens", "at least 1"),
    "max_tokens as text": (CHAT, make_body(max_tokens="4"), "max_tokens", "integer"),
    "max_tokens as a fraction": (CHAT, make_body(max_tokens=1.5), "max_tokens", "integer"),
    "max_tokens as true": (CHAT, make_body(max_tokens=True), "max_tokens", "integer"),
    "a hot temperature": (CHAT, make_body(temperature="hot"), "temperature", "number"),
    "a negative temperature": (CHAT, make_body(temperature=-1), "temperature", "at least 0"),
    "temperature NaN": (CHAT, make_literal_body("temperature", "NaN"), None, "JSON"),
    "temperature 1e999": (CHAT, make_literal_body("temperature", "1e999"), None, "out of range"),
    "top_p of 2": (CHAT, make_body(top_p=2), "top_p", "from 0"),
    "top_k of -2": (CHAT, make_body(top_k=-2), "top_k", "at least -1"),
    "a seed of 100 digits": (CHAT, make_literal_body("seed", "9" * 100), "seed", "integer"),
    "a seed as text": (CHAT, make_body(seed="x"), "seed", "integer"),
    "a biased token that is none": (CHAT, make_body(logit_bias={"999999": 1}), "logit_bias", "token ids"),
    "20 of 21 logprobs": (CHAT, make_body(logprobs=True, top_logprobs=21), "top_logprobs", "20"),
    "17 answers": (CHAT, make_body(n=17), "n", "from 1 to 16"),
    "the best of two": (COMPLETIONS, make_prompt_body(best_of=2), "best_of", "leave it out"),
    "the best of two in chat": (CHAT, make_body(best_of=2), "best_of", "leave it out"),
    "llama.cpp's length": (CHAT, make_body(n_predict=5), "n_predict", "max_tokens"),
    "an extra body as such": (CHAT, make_body(extra_body={"top_k": 5}), "extra_body", "into the body itself"),
    "Ollama's options": (COMPLETIONS, make_prompt_body(options={"num_ctx": 5}), "options", "into the body itself"),
    "beams": (COMPLETIONS, make_prompt_body(use_beam_search=True), "use_beam_search", "leave it out"),
    "more tokens than there may be": (CHAT, make_body(min_tokens=5), "min_tokens", "more than 'max_tokens'"),
    "a stop token that is none": (CHAT, make_body(stop_token_ids=[263]), "stop_token_ids", "from 0 to 262"),
    "two forms": (CHAT, make_body(json_schema={}, grammar='root ::= "a"'), "json_schema", "both say"),
    "a spoken answer": (CHAT, make_body(modalities=["text", "audio"]), "modalities", "text"),
    "a voice": (CHAT, make_body(audio={"voice": "alloy", "format": "wav"}), "audio", "text"),
    "functions of old": (CHAT, make_body(functions=[{"name": "look"}]), "functions", "tools"),
    "a function called of old": (CHAT, make_body(function_call={"name": "look"}), "function_call", "tool_choice"),
    "stream as text": (CHAT, make_body(stream="yes"), "stream", "true or false"),
    "stream_options as text": (CHAT, make_body(stream=True, stream_options="all"), "stream_options", "object"),
    "a model as number": (CHAT, make_body(model=5), "model", "string"),
    "a model name without end": (CHAT, make_body(model="m" * 1025), "model", "at most 1024"),
    "no messages at all": (CHAT, {"model": "m"}, "messages", "list"),
    "an empty list of messages": (CHAT, make_body(messages=[]), "messages", "at least one"),
    "messages as text": (CHAT, make_body(messages="hello"), "messages", "list"),
    "a message as text": (CHAT, make_body(messages=["hello"]), "messages[0]", "object"),
    "a message without a role": (CHAT, make_body(messages=[{"content": "x"}]), "messages[0].role", "string"),
    "content as number": (CHAT, make_body(messages=[{"role": "user", "content": 5}]), "messages[0].content", "string"),
    "an image": (CHAT, make_body(messages=[{"role": "user", "content": [IMAGE]}]), "messages[0].content[0]", "text"),
    "tools as text": (CHAT, make_body(tools="hammer"), "tools", "list"),
    "a role misspelt": (
        CHAT,
        make_body(messages=[{"role": "usr", "content": "x"}]),
        "messages[0].role",
        "user, assistant",
    ),
    "a user who says nothing": (CHAT, make_body(messages=[{"role": "user"}]), "messages[0].content", "a string"),
    "a tool without its function": (
        CHAT,
        make_body(tools=[{"name": "f"}]),
        "tools[0].function",
        "an object with a name",
    ),
    "a forced tool": (
        CHAT,
        make_body(tools=[{"type": "function"}], tool_choice="required"),
        "tools[0].function",
        "a name",
    ),
    "a forced tool and none": (CHAT, make_body(tool_choice="required"), "tool_choice", "send some"),
    "no JSON schema": (
        CHAT,
        make_body(response_format={"type": "json_schema"}),
        "response_format.json_schema",
        "object",
    ),
    "a tool of Responses": (RESPONSES, {"input": "hi", "tools": ODD_TOOLS}, "tools[1].parameters", "'tools[1].param"),
    "no prompt": (COMPLETIONS, {"model": "m"}, "prompt", "string"),
    "an empty prompt": (COMPLETIONS, make_prompt_body(prompt=""), "prompt", "empty"),
    "one of two prompts empty": (COMPLETIONS, make_prompt_body(prompt=["a", ""]), "prompt", "empty"),
    "65 prompts": (COMPLETIONS, make_prompt_body(prompt=["a"] * 65), "prompt", "at most 64"),
    "ids out of range": (COMPLETIONS, make_prompt_body(prompt=[1, 263]), "prompt", "262"),
    "negative ids": (COMPLETIONS, make_prompt_body(prompt=[-1]), "prompt", "262"),
    "huge ids": (COMPLETIONS, make_prompt_body(prompt=[2**63]), "prompt", "262"),
    "ids as fractions": (COMPLETIONS, make_prompt_body(prompt=[1.5]), "prompt", "token ids"),
    "an echo with logprobs": (COMPLETIONS, make_prompt_body(echo=True, logprobs=0), "echo", "leave one"),
    "a suffix": (COMPLETIONS, make_prompt_body(suffix="x"), "suffix", "leave it out"),
    "more than the context": (
        COMPLETIONS,
        make_prompt_body(prompt="x" * CONTEXT_TOKENS),
        "prompt",
        "maximum context length",
    ),
}
CODES = {"more than the context": "context_length_exceeded"}

ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "top_k over the vocabulary": (CHAT, make_body(top_k=1_000_000)),
    "top_k of the vocabulary's size": (CHAT, make_body(top_k=263)),
    "nulls": (CHAT, make_body(stop=None, seed=None, temperature=None, stream=None, tools=None, top_p=None)),
    "what is off": (CHAT, make_body(best_of=1, use_beam_search=False, options={}, n_predict=-1, prompt_logprobs=None)),
    "a field misspelt": (CHAT, make_body(temprature=0.5)),
    "a limit beyond the context": (CHAT, make_body(max_tokens=4, max_completion_tokens=None, extra=10**30)),
    "text parts": (
        CHAT,
        make_body(messages=[{"role": "user", "content": [{"type": "text", "text": "Are you well?"}]}]),
    ),
}


@pytest.fixture(scope="module")
def good_answer(warm_pair: Pair) -> str:
    """Answer of a good request."""
    return warm_pair.chat(MESSAGES, max_tokens=4).text


@pytest.fixture(autouse=True)
def still_works(warm_pair: Pair, good_answer: str) -> Iterator[None]:
    yield
    reply = warm_pair.chat(MESSAGES, max_tokens=4)
    assert reply.text == good_answer
    assert warm_pair.post(COMPLETIONS, make_prompt_body()).status == 200


def check_refusal(reply: Reply, status: int = 400) -> dict[str, Any]:
    assert reply.status == status, reply.raw
    assert {name.lower(): value for name, value in reply.headers.items()}["content-type"].startswith("application/json")
    error = reply.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"] and "/kv/prompts" not in error["message"] and len(error["message"]) < 600
    return dict(error)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_request_is_refused(warm_pair: Pair, name: str) -> None:
    path, sent, param, word = REFUSED[name]
    error = check_refusal(warm_pair.post(path, sent))
    assert word in error["message"]
    assert param is None or error["param"] == param
    assert error["code"] == CODES.get(name)


@pytest.mark.parametrize("path", [MESSAGES_PATH, f"{MESSAGES_PATH}/count_tokens"])
def test_refused_tool_of_messages_has_its_field(warm_pair: Pair, path: str) -> None:
    tools = [{"type": "web_search_20250305", "name": "s"}, {"name": "f", "input_schema": ODD_SCHEMA, "strict": True}]
    reply = warm_pair.post(path, make_body(tools=tools))
    assert reply.status == 400 and reply.json["error"]["message"].startswith("'tools[1].input_schema' ")


@pytest.mark.parametrize("name", ["stop: [5]", "0 max_tokens", "more than the context"])
def test_bad_streamed_request_is_refused_before_stream(warm_pair: Pair, name: str) -> None:
    path, sent, param, _ = REFUSED[name]
    assert isinstance(sent, dict)
    assert check_refusal(warm_pair.post(path, {**sent, "stream": True}))["param"] == param


@pytest.mark.parametrize("name", ANSWERED)
def test_unusual_request_is_answered(warm_pair: Pair, good_answer: str, name: str) -> None:
    reply = warm_pair.post(*ANSWERED[name])
    assert reply.status == 200 and reply.text == good_answer


def test_exact_repeat_computes_one_token(warm_pair: Pair) -> None:
    sent = [{"role": "user", "content": "Repeat after me, exactly."}]
    cold = warm_pair.ask_backend(sent, max_tokens=12)
    for _ in range(3):
        reply = warm_pair.chat(sent, max_tokens=12)
        assert reply.text == cold.text
    assert reply.cached == reply.prompt_tokens - 1
    assert reply.json["usage"]["completion_tokens"] == 12


# ---- how a request travels


def send_raw(pair: Pair, method: str, path: str, data: object = None, **headers: str) -> Reply:
    """Send data without urllib's additions; an iterator is sent chunked."""
    connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=60)
    try:
        connection.request(method, path, data, headers, encode_chunked=isinstance(data, Iterator))  # type: ignore[arg-type]
        response = connection.getresponse()
        return Reply(response.status, dict(response.headers), response.read())
    finally:
        connection.close()


def test_all_transfer_codings_are_read(warm_pair: Pair, good_answer: str) -> None:
    data = json.dumps(make_body()).encode()
    chunked = {"Transfer-Encoding": "chunked"}
    assert send_raw(warm_pair, "POST", CHAT, iter([data[:10], data[10:]]), **chunked).text == good_answer
    assert send_raw(warm_pair, "POST", CHAT, gzip.compress(data), **{"Content-Encoding": "gzip"}).text == good_answer
    assert send_raw(warm_pair, "POST", CHAT, data, **{"Content-Type": "text/plain"}).text == good_answer
    check_refusal(send_raw(warm_pair, "POST", CHAT, b"no gzip at all", **{"Content-Encoding": "gzip"}))
    check_refusal(send_raw(warm_pair, "POST", CHAT, b"\x00\xff", **{"Content-Encoding": "rot13"}), 415)


@pytest.mark.parametrize("suffix", ["/", "?x=1", "/?x=1&y=%20"])
def test_paths_with_query_or_slash(warm_pair: Pair, good_answer: str, suffix: str) -> None:
    assert warm_pair.post(CHAT + suffix, make_body()).text == good_answer
    assert send_raw(warm_pair, "GET", "/v1/models" + suffix).json["data"][0]["object"] == "model"


def test_head_and_options(warm_pair: Pair) -> None:
    for path in ("/v1/models", "/health", "/ready"):
        reply = send_raw(warm_pair, "HEAD", path)
        assert (reply.status, reply.raw) == (200, b"")
    assert send_raw(warm_pair, "OPTIONS", CHAT).status == 204


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("PUT", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v2", 404),
        ("GET", "/", 404),
    ],
)
def test_wrong_paths_and_methods_are_refused(warm_pair: Pair, method: str, path: str, status: int) -> None:
    message = check_refusal(send_raw(warm_pair, method, path), status)["message"]
    assert path.rpartition("/")[2] in message or method in message


@pytest.mark.parametrize("path", ["/kv/status", "/KV/status", "//kv/status", "/kv", "/%6bv/status", "/v1/../kv/status"])
def test_backend_paths_are_not_exposed(warm_pair: Pair, path: str) -> None:
    check_refusal(send_raw(warm_pair, "GET", path), 404)
    check_refusal(send_raw(warm_pair, "GET", path, Authorization=f"Bearer {warm_pair.home.load_secret()}"), 404)


def test_backend_requests_cannot_be_cancelled_by_clients(warm_pair: Pair) -> None:
    reply = warm_pair.chat(MESSAGES, max_tokens=4)
    check_refusal(send_raw(warm_pair, "DELETE", f"/requests/{reply.headers['X-Warmline-Request']}"), 404)
    wrong = {"Authorization": "Bearer another"}
    check_refusal(send_raw(warm_pair, "GET", "/warmline/status", **wrong), 401)
    check_refusal(send_raw(warm_pair, "POST", "/warmline/purge", b'{"everything": true}', **wrong), 401)
    check_refusal(send_raw(warm_pair, "POST", "/warmline/purge", b'{"everything": true}'), 403)


def test_internal_headers_from_clients_are_ignored(warm_pair: Pair, good_answer: str) -> None:
    """But for the name of the request, which is the client's to choose."""
    headers = {
        "X-Warmline-Prompt": "x",
        "X-Warmline-Resident": "y",
        "X-Warmline-Follow": "y",
        "X-Warmline-Reuse": "999",
        "X-Warmline-Request": "z",
    }
    reply = warm_pair.post(CHAT, make_body(), **headers)
    assert reply.text == good_answer and reply.headers["X-Warmline-Request"] == "z"
