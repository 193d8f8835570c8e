"""Servers that are started as a user starts them, and plain HTTP to ask them with."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surface_programs import executable

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True)
class Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    @property
    def json(self) -> Any:
        """JSON of the body; None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@contextmanager
def open_response(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Send a request and read the head of its answer; the caller reads the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    typed = {"Content-Type": "application/json"} if data is not None else {}
    try:
        connection.request(method, path, data, {**typed, **(headers or {})})
        yield connection.getresponse()
    finally:
        connection.close()


def ask(port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
    with open_response(port, method, path, body, headers) as response:
        return Answer(response.status, tuple(response.getheaders()), response.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Process of `warmline` that runs until it is stopped; its output is in a file."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [executable("warmline"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
            )

    def wait(self, port: int, path: str) -> None:
        """Wait until GET of this path is answered 200."""
        limit = time.monotonic() + START_TIMEOUT_S
        while not _is_fine(port, path):
            assert self._process.poll() is None and time.monotonic() < limit, self.log.read_text()
            time.sleep(POLL_S)

    def stop(self) -> int:
        """Stop by SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the server if it still runs; its failure is reported elsewhere."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(STOP_TIMEOUT_S)


def _is_fine(port: int, path: str) -> bool:
    try:
        return ask(port, "GET", path).status == http.client.OK
    except OSError:
        return False


def plain_environment(home: Path) -> dict[str, str]:
    """Keep of our environment what programs need, so that no setting of the caller counts."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    more = {"HOME": str(home), "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {"LANG": "C.UTF-8", **kept, **more}
