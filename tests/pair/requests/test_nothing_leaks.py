"""Privacy: no request text, key or secret is in a log or an error, however requests fail.

Two pairs at the level debug, one with text on stderr, one with JSON in files, are sent good and bad requests of all
APIs with a word in every place that no log may have; then every byte that they wrote is searched for it.
"""

import gzip
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.pair.pair import FolderOf, Pair, Reply, send_request

KEY = "wl-zq91-the-key-of-a-client"
TEXT = "zq73 wombats sang of the river, and nobody heard them until the morning came"  # of messages: nowhere
WORD = "zq55 wombat"  # the value of a parameter: in the error that its client gets, and nowhere else
TRACES = ("zq73", "zq55", "zq91")
# What quotes what it is given, in each way that a template can.
TEMPLATE = """{%- for message in messages -%}
{%- if 'to raise' in message.content %}{{ raise_exception('It is no good: ' + message.content) }}{% endif -%}
{%- if 'to undefined' in message.content %}{{ message[message.content].missing }}{% endif -%}
{%- if 'to type' in message.content %}{{ message.content + 1 }}{% endif -%}
{%- if 'to value' in message.content %}{{ '%d' | format(message.content) }}{% endif -%}
<|im_start|>{{ message.role }}: {{ message.content }}<|im_end|>
{%- endfor -%}<|im_start|>assistant"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": TEXT}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "description": TEXT, "parameters": SCHEMA}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"a": TEXT})}}
CHAT, COMPLETION, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
LEAK = {"metadata": {"a": TEXT}, "user": TEXT, WORD: TEXT, "temprature": TEXT}


def make_user_message(text: str = TEXT) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def make_chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": make_user_message(), "max_tokens": 3, **fields}


def make_strict_form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


GOOD: list[tuple[str, object]] = [
    (CHAT, make_chat_body(**LEAK, stop=[TEXT], stream=True)),
    (CHAT, make_chat_body(messages=[{"role": "system", "content": TEXT}, *make_user_message()], n=2)),
    (
        CHAT,
        make_chat_body(
            messages=[
                *make_user_message(),
                {"role": "assistant", "content": TEXT, "tool_calls": [CALL]},
                *make_user_message(),
            ]
        ),
    ),
    (CHAT, make_chat_body(tools=[TOOL])),
    (COMPLETION, {"prompt": TEXT, "max_tokens": 3, "echo": True, **LEAK}),
    (MESSAGES, {"system": TEXT, "messages": make_user_message(), "max_tokens": 3, "stop_sequences": [TEXT], "x": TEXT}),
    (MESSAGES + "/count_tokens", {"system": TEXT, "messages": make_user_message()}),
    (RESPONSES, {"instructions": TEXT, "input": TEXT, "max_output_tokens": 3, "metadata": {"a": TEXT}}),
]
BAD: list[tuple[str, object]] = [
    *(
        (CHAT, make_chat_body(messages=make_user_message(f"{TEXT} to {way}")))
        for way in ("raise", "undefined", "type", "value")
    ),
    *(
        (MESSAGES, {"messages": make_user_message(f"{TEXT} to {way}"), "max_tokens": 3})
        for way in ("raise", "undefined")
    ),
    *((path, ('{"messages": "' + TEXT).encode()) for path in (CHAT, COMPLETION, MESSAGES, RESPONSES)),
    *((path, [TEXT]) for path in (CHAT, COMPLETION, MESSAGES, RESPONSES)),
    *((path, b'{"messages": "\xff' + TEXT.encode() + b'"}') for path in (CHAT, MESSAGES, RESPONSES)),
    (CHAT, make_chat_body(messages=TEXT)),
    (CHAT, make_chat_body(messages=[TEXT])),
    (CHAT, make_chat_body(messages=[{"role": WORD, "content": TEXT}])),
    (CHAT, make_chat_body(messages=[{"role": "user", "content": [{"type": WORD, "text": TEXT}]}])),
    (CHAT, make_chat_body(messages=[{"role": "user", "content": {TEXT: TEXT}}])),
    *(
        (CHAT, make_chat_body(**{name: WORD}))
        for name in ("temperature", "n", "seed", "tool_choice", "reasoning_effort")
    ),
    *(
        (CHAT, make_chat_body(**{name: TEXT}))
        for name in ("top_p", "logit_bias", "max_tokens", "tools", "stop_token_ids")
    ),
    (CHAT, make_chat_body(logit_bias={WORD: 1})),
    (CHAT, make_chat_body(functions=TEXT)),
    (CHAT, make_chat_body(chat_template_kwargs={WORD: TEXT}, messages=make_user_message(f"{TEXT} to raise"))),
    (CHAT, make_chat_body(tools=[{"type": "function", "function": {"name": "a", "parameters": TEXT}}])),
    (CHAT, make_chat_body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": WORD}})),
    (CHAT, make_chat_body(response_format={"type": WORD})),
    (
        CHAT,
        make_chat_body(response_format=make_strict_form({"type": WORD})),
    ),
    (
        CHAT,
        make_chat_body(response_format=make_strict_form({"$ref": WORD})),
    ),
    (CHAT, make_chat_body(structured_outputs={"regex": f"{WORD}("})),
    (CHAT, make_chat_body(grammar=f"{WORD} ::= nothing")),
    (CHAT, make_chat_body(messages=make_user_message(TEXT * 2_000))),
    (COMPLETION, {"prompt": {TEXT: TEXT}}),
    (MESSAGES, {"messages": [{"role": WORD, "content": TEXT}], "max_tokens": 3}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": WORD, "text": TEXT}]}], "max_tokens": 3}),
    (MESSAGES, {"messages": make_user_message(), "max_tokens": WORD}),
    (MESSAGES, {"messages": make_user_message(), "max_tokens": 3, "tools": WORD}),
    (RESPONSES, {"input": [{"type": WORD, "content": TEXT}]}),
    (RESPONSES, {"input": TEXT, "tools": [{"type": WORD, "name": WORD}], "tool_choice": {"type": WORD}}),
    (RESPONSES, {"input": TEXT, "text": {"format": {"type": WORD}}}),
    (RESPONSES, {"input": {TEXT: TEXT}}),
]
# Of headers and lines; each is refused.
HEADERS: list[dict[str, str]] = [
    {"Authorization": f"Bearer {WORD}"},
    {"Authorization": "", "X-Api-Key": WORD},
    {"Authorization": WORD, "Cookie": WORD},
    {"X-Warmline-Request": WORD},
    {"X-Warmline-Total-Timeout": WORD},
    {"Content-Encoding": "gzip"},
]
POST = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
RAW = [
    f"{TEXT}\r\n\r\n",
    f"GET /{WORD} HTTP/1.1\r\nHost: localhost\r\n\r\n",
    f"GET / HTTP/1.1\r\nHost: localhost\r\n{WORD}\r\n\r\n",
    f"GET / HTTP/1.1\r\nHost: localhost\r\nA: \x01{WORD}\r\n\r\n",
    f"{POST}Transfer-Encoding: chunked\r\n\r\n{WORD}\r\n",
    f"{POST}Content-Length: {WORD}\r\n\r\n",
]
PATHS = [f"{CHAT}?key={KEY}&text=zq55", "/v1/zq55?key=zq73", "/warmline/zq55", "/v1/models/zq55", "/v1/requests/zq55"]


@pytest.fixture(scope="module")
def folder(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template quotes what it is given."""
    own = tmp_path_factory.mktemp("models") / "quoting"
    shutil.copytree(tiny_folder("llama"), own)
    settings = own / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return own


def start_pair(folder: Path, home: Path, *flags: str) -> Pair:
    environment = {**os.environ, "WARMLINE_CLIENT_KEY": KEY}
    return Pair(home, folder, "--log-level", "debug", *flags, environment=environment)


@pytest.fixture(scope="module", params=["text", "json"])
def written(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["WrittenBytes"]:
    json_flags = ("--log-format", "json", "--log-files", "--titles", "off", "--responses-keep-days", "0")
    flags = json_flags if request.param == "json" else ()
    with start_pair(folder, tmp_path_factory.mktemp("leaks"), *flags) as pair:
        recorder = WrittenBytes(pair, keeps_titles=not flags)
        recorder.send_all_requests()
        if request.param == "json":
            recorder.kill_backend()
        pair.settle()
        recorder.read_while_running()
        if request.param == "json":
            pair.kill()  # a backend that is just being started takes a while to stop
        else:
            pair.stop()
            pair.read_output()
        recorder.read_files()
    yield recorder


class WrittenBytes:
    """Requests to a pair, and every byte that the pair wrote."""

    def __init__(self, pair: Pair, *, keeps_titles: bool) -> None:
        self.pair, self.keeps_titles, self.good, self.bad = pair, keeps_titles, list[Reply](), list[Reply]()
        self.texts: dict[str, str] = {}

    def send_all_requests(self) -> None:
        mine = {"Authorization": f"Bearer {KEY}", "Cookie": WORD}
        self.good = [self.pair.post(path, body, **mine) for path, body in GOOD]
        self.bad = [self.pair.post(path, body, **mine) for path, body in BAD]
        self.bad += [self.pair.post(CHAT, make_chat_body(), **{**mine, **headers}) for headers in HEADERS]
        self.bad += [self.pair.post(path, b"", **{**mine, "Authorization": ""}) for path in PATHS]
        self.bad.append(self.pair.post(CHAT, gzip.compress(TEXT.encode())[:-9], **mine, **{"Content-Encoding": "gzip"}))
        self.bad.append(send_request(f"{self.pair.url}/v1/requests/zq55", None, mine, "DELETE"))
        for lines in RAW:
            send_raw(self.pair.port, lines.encode())

    def kill_backend(self) -> None:
        """In the midst of an answer that is too long to be over."""
        body = json.dumps(make_chat_body(max_tokens=90_000, ignore_eos=True, stream=True)).encode()
        with socket.create_connection(("127.0.0.1", self.pair.port), timeout=20) as client:
            client.sendall(f"{POST}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            data = read_until(client, b'"content"')
            os.kill(self.pair.pid("backend"), signal.SIGKILL)
            data += read_until(client, b"\r\n0\r\n")
        self.texts["the end of a stream"] = data[data.index(b'"error"') :].decode()

    def read_while_running(self) -> None:
        """While it runs: what others may read of it."""
        mine = {"Authorization": f"Bearer {KEY}"}
        self.texts["/metrics"] = send_request(f"{self.pair.url}/metrics", None, mine, "GET").raw.decode()
        self.texts |= {str(file): file.read_text() for file in self.pair.home.run.iterdir()}

    def read_files(self) -> None:
        self.texts["stdout and stderr"] = "\n".join(self.pair.log)
        self.texts |= {str(file): file.read_text() for file in self.pair.home.logs.iterdir()}

    @property
    def log(self) -> str:
        files = [text for name, text in self.texts.items() if name.endswith((".log", "stderr"))]
        return "\n".join(files)


def read_until(client: socket.socket, word: bytes) -> bytes:
    data = b""
    while word not in data:
        piece = client.recv(65536)
        assert piece, data
        data += piece
    return data


def send_raw(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while client.recv(65536):
                pass


def test_all_canary_requests_were_sent(written: WrittenBytes) -> None:
    assert not [reply.raw[:500] for reply in written.good if reply.status != 200]
    assert not [reply.raw[:500] for reply in written.bad if not 400 <= reply.status < 500]


def test_logs_have_no_text_key_or_secret(written: WrittenBytes) -> None:
    secret = written.pair.home.load_secret()
    found = [
        (name, line[:500])
        for name, text in written.texts.items()
        for line in text.splitlines()
        if any(trace in line.lower() for trace in (*TRACES, secret))
    ]
    assert not found


def test_titles_off_keeps_no_text_in_the_home(written: WrittenBytes) -> None:
    home = written.pair.home
    paths = [path for path in home.root.rglob("*") if path.is_file() and home.segments not in path.parents]
    words = [word.encode(coding) for word in TRACES[:2] for coding in ("utf-8", "utf-16-le")]
    found = [path for path in paths if any(word in path.read_bytes().lower() for word in words)]
    if written.keeps_titles:
        assert found and all(home.index in path.parents for path in found)
    else:
        assert not found


def test_errors_have_no_message_or_secret(written: WrittenBytes) -> None:
    hidden = ("zq73", "zq91", written.pair.home.load_secret())
    assert not [reply.raw[:500] for reply in written.bad if any(trace in reply.raw.decode() for trace in hidden)]


def test_each_refusal_is_one_log_line_with_id(written: WrittenBytes) -> None:
    lines = [line for line in written.log.splitlines() if "refused" in line]
    for reply in written.bad:
        request_id = reply.headers["X-Warmline-Request"]
        assert reply.headers["X-Request-Id"] == reply.headers["Request-Id"] == request_id
        line_count = 0 if reply.status == 401 else 1  # tried keys are told together, lest they fill the log
        assert len([line for line in lines if request_id in line]) == line_count, request_id


def test_both_logs_report_each_request(written: WrittenBytes) -> None:
    for (path, _), reply in zip(GOOD, written.good, strict=True):
        about = [line for line in written.log.splitlines() if reply.headers["X-Warmline-Request"] in line]
        assert any("warmline_backend" in line for line in about)
        assert any("warmline_proxy" in line for line in about) or path.endswith("count_tokens")


def test_debug_log_has_own_loggers_only(written: WrittenBytes) -> None:
    lines = [line for line in written.log.splitlines() if "DEBUG" in line or '"level": "debug"' in line]
    assert lines and all("warmline_" in line for line in lines)
    assert any("planned: " in line for line in lines)
