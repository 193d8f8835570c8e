"""Real pair under `warmline serve`, as a user runs it: real processes, real sockets, SIGKILL."""

import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from typer.testing import CliRunner

from support.processes import RunningProcess, free_port
from warmline_cachectl.cli import app as cachectl
from warmline_common.protocol.messages import (
    BackendStatus,
    PromptReply,
    PromptRequest,
    Resident,
    ResidentsReply,
    decode,
    encode,
)
from warmline_common.storage.home import Home
from warmline_proxy.index.index import IndexReader

WARMLINE = str(Path(sys.executable).with_name("warmline"))
START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 60.0
POLL_S = 0.02
LOG_LINES = 60  # that explain a failure

Message = dict[str, str]
FolderOf = Callable[..., Path]  # what the fixture `tiny_folder` is


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def text(self) -> str:
        return str(self.json["choices"][0]["message"]["content"])

    @property
    def reasoning(self) -> str:
        """Reasoning, before the text; all of a random model's output if its template opens the reasoning."""
        return str(self.json["choices"][0]["message"].get("reasoning_content", ""))

    @property
    def cached(self) -> int:
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def prompt_tokens(self) -> int:
        return int(self.json["usage"]["prompt_tokens"])


class Pair:
    """Proxy and backend on free ports over one home; `kill` and `start` as often as you like."""

    def __init__(self, home: Path, model: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self.home, self._model, self._flags, self._environment = Home(home), model, flags, environment
        self.port, self.backend_port = free_port(), free_port()
        self._serve: RunningProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def backend_url(self) -> str:
        return f"http://127.0.0.1:{self.backend_port}"

    @property
    def log(self) -> list[str]:
        assert self._serve is not None
        return self._serve.seen

    def start(self) -> Self:
        ports = ["--port", str(self.port), "--backend-port", str(self.backend_port)]
        given = ["--audit-fraction", "0", *self._flags]  # no audits by chance, unless a test wants them
        arguments = ["serve", "--home", str(self.home.root), *self._model_flags, *ports, *given]
        self._serve = RunningProcess([WARMLINE, *arguments], self._environment)
        self._serve.wait_for("^ready http://", START_TIMEOUT_S)
        return self

    @property
    def _model_flags(self) -> Sequence[str]:
        return ["--model", str(self._model)]

    def kill(self) -> None:
        """Kill all three processes at once with SIGKILL, as a power cut does."""
        assert self._serve is not None
        for pid in (self._serve.process.pid, self.pid("proxy"), self.pid("backend")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._serve.process.wait()
        self._serve.wait_for_silence()

    @property
    def is_up(self) -> bool:
        return self._serve is not None and self._serve.process.poll() is None

    def read_output(self) -> list[str]:
        """Read all output, once the process has ended."""
        assert self._serve is not None
        return self._serve.wait_for_silence()

    def stop(self) -> None:
        """Stop as Ctrl-C does; answered requests are on disk afterwards."""
        assert self._serve is not None
        self._serve.process.send_signal(signal.SIGTERM)
        self._serve.process.wait(30)

    def pid(self, process: str) -> int:
        return int(self.home.pid_file(process).read_text())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._serve is not None:
            self.stop()

    # ---- asking

    def post(self, path: str, body: object, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return send_request(self.url + path, data, {"Content-Type": "application/json", **headers})

    def chat(self, messages: list[Message], **options: object) -> Reply:
        reply = self.post("/v1/chat/completions", {"model": "any/name", "messages": messages, **options})
        assert reply.status == 200, "\n".join([str(reply.raw), *self.log[-LOG_LINES:]])
        return reply

    def ask_backend(self, messages: list[Message], **options: object) -> Reply:
        """Send the request to the backend directly, which then reuses nothing: the cold answer."""
        body = json.dumps({"messages": messages, **options}).encode()
        return self.as_owner("POST", self.backend_url + "/v1/chat/completions", body)

    def settle(self) -> None:
        """Wait until the tails of all answered requests are durable."""
        limit = time.monotonic() + SETTLE_TIMEOUT_S
        while self.proxy_status()["settling"]:
            assert time.monotonic() < limit, "the pair does not settle"
            time.sleep(POLL_S)

    # ---- looking inside

    def status(self) -> BackendStatus:
        """Fetch the backend's status."""
        return decode(self.as_owner("GET", self.backend_url + "/kv/status").raw, BackendStatus)

    def proxy_status(self) -> Any:
        return self.as_owner("GET", self.url + "/warmline/status").json

    def wait_for_log_line(self, pattern: str) -> str:
        """Wait for the next log line that matches; earlier lines that no wait has passed count too."""
        assert self._serve is not None
        return self._serve.wait_for(pattern, SETTLE_TIMEOUT_S).string

    def perf_line(self, reply: Reply) -> str:
        """Wait for the PERF line of a request; at most once for each request, in their order."""
        assert self._serve is not None
        return self._serve.wait_for(f"PERF request={reply.headers['X-Warmline-Request']} ").string

    def perf_lines(self, model: str, count: int) -> list[str]:
        """Wait for the next PERF lines of requests for this model name."""
        assert self._serve is not None
        return [self._serve.wait_for(f'PERF .* client_model="{model}"', SETTLE_TIMEOUT_S).string for _ in range(count)]

    def cachectl(self, *words: str, code: int = 0) -> Any:
        """JSON output of the command, if any.  Runs in this process, for speed, as any other reader."""
        done = CliRunner().invoke(cachectl, [*words, "--json", "--home", str(self.home.root)])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if done.stdout else None

    def requests(self) -> list[Any]:
        """Read the records of the last requests, newest first."""
        with IndexReader(self.home) as reader:
            return [msgspec.to_builtins(record) for record in reader.requests()]

    def render_prompt(self, messages: list[Message], **fields: Any) -> PromptReply:
        """Render the prompt of these messages and other fields of a body."""
        request = PromptRequest(request_id="test", endpoint="chat", body={"messages": messages, **fields})
        return decode(self.as_owner("POST", self.backend_url + "/kv/prompts", encode(request)).raw, PromptReply)

    def residents(self) -> list[Resident]:
        reply = self.as_owner("GET", self.backend_url + "/kv/residents?ids=1")
        return decode(reply.raw, ResidentsReply).residents

    def longest_resident(self) -> bytes:
        """Find the packed tokens of the longest KV in memory."""
        return max((resident.ids or b"" for resident in self.residents()), key=len, default=b"")

    def forget_residents(self) -> None:
        """Drop all KV in memory behind the proxy's back; only what is on disk is left."""
        for resident in self.residents():
            self.as_owner("DELETE", f"{self.backend_url}/kv/residents/{resident.id}")

    def warm_up_restores(self) -> None:
        """Have a prompt restored some times: a process's first restore may be slow, and plans go by recent ones."""
        messages: list[Message] = [{"role": "user", "content": "What is on disk is restored. " * 60}]
        for _ in range(3):
            reply = self.chat(messages, max_tokens=1)
            self.settle()
            self.forget_residents()
        assert reply.headers["X-Warmline-Cache"].startswith("restored")

    def as_owner(self, method: str, url: str, data: bytes | None = None) -> Reply:
        return send_request(url, data, {"Authorization": f"Bearer {self.home.load_secret()}"}, method)


def send_request(
    url: str, data: bytes | None, headers: dict[str, str], method: str = "POST", timeout_s: float = 300
) -> Reply:
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Reply(response.status, dict(response.headers), response.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, dict(error.headers), error.read())
