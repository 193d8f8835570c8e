"""MCP servers installed in a folder of their own and asked, over stdio, for their tools.

No script of a package runs when it is installed.  A server gets an environment with dummy keys and nothing of the
caller's, and no network where `unshare` can take it away.
"""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus.sources import DUMMY_VARIABLES, ToolServer

INSTALL_TIMEOUT_S = 420.0
ANSWER_TIMEOUT_S = 60.0
ANSWER_BYTES_MAX = 32 << 20
PAGE_COUNT_MAX = 50
PROTOCOL_VERSION = "2025-06-18"
INITIALIZE = {
    "protocolVersion": PROTOCOL_VERSION,
    "capabilities": {},
    "clientInfo": {"name": "schema-corpus", "version": "1"},
}


class ToolServerError(Exception):
    """A server that can't be installed, or doesn't list its tools."""


def list_tools(server: ToolServer, folder: Path) -> list[dict[str, Any]]:
    """List a server's tools; it is installed in `folder` first, once.  Raises ToolServerError."""
    command = (install_npm if server.registry == "npm" else install_pypi)(server, folder)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [*_isolate(), *command, *server.arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr.txt").open("wb"),
        cwd=home,
        env=DUMMY_VARIABLES | {"HOME": str(home), "PATH": os.environ["PATH"], "DO_NOT_TRACK": "1", "CI": "1"},
        start_new_session=True,
    )
    try:
        return list(_Session(process).iter_tools())
    except BrokenPipeError as error:
        raise ToolServerError(_describe_exit(folder)) from error
    except ToolServerError as error:
        raise ToolServerError(f"{error}: {_describe_exit(folder)}") from error
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _describe_exit(folder: Path) -> str:
    lines = (folder / "stderr.txt").read_text(errors="replace").split("\n")
    return next(
        (line.strip()[:160] for line in lines if re.search("error|must|requir|missing", line, re.I)), "no reason"
    )


def _isolate() -> list[str]:
    if sys.platform != "linux" or (unshare := shutil.which("unshare")) is None:
        return []
    prefix = [unshare, "--map-root-user", "--net"]
    works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    return prefix if works else []


class _Session:
    """A conversation of JSON lines, with an end in time and in bytes."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process, self._buffer, self._last_id = process, b"", 0
        self._end_s = time.monotonic() + ANSWER_TIMEOUT_S

    def iter_tools(self) -> Iterator[dict[str, Any]]:
        self._request("initialize", INITIALIZE)
        self._send({"method": "notifications/initialized"})
        cursor: dict[str, Any] = {}
        for _ in range(PAGE_COUNT_MAX):
            result = self._request("tools/list", cursor)
            yield from result.get("tools", ())
            if not result.get("nextCursor"):
                return
            cursor = {"cursor": result["nextCursor"]}

    def _request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._last_id += 1
        self._send({"id": self._last_id, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("method") and "id" in message:
                self._send({"id": message["id"], "error": {"code": -32601, "message": "not supported"}})
            elif message.get("id") == self._last_id:
                if "result" not in message:
                    raise ToolServerError(f"{method}: {json.dumps(message.get('error'))[:160]}")
                return dict(message["result"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        """Read the next message; lines that are none are skipped."""
        assert self._process.stdout is not None
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                try:
                    message = json.loads(line)
                except ValueError:
                    continue
                if isinstance(message, dict):
                    return message
                continue
            left_s = self._end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise ToolServerError(f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data or len(self._buffer) > ANSWER_BYTES_MAX:
                raise ToolServerError("closed its output" if not data else "sent too much")
            self._buffer += data


# ---- installation


def install_npm(server: ToolServer, folder: Path) -> list[str]:
    place = folder / "node_modules" / server.package
    if not (place / "package.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--omit=dev", "--prefix", str(folder)]
        run_installer(["npm", "install", *options, f"{server.package}@{server.version}"], folder)
    commands = json.loads((place / "package.json").read_text()).get("bin") or {}
    if isinstance(commands, str):
        commands = {"": commands}
    wanted = server.command or server.package.rpartition("/")[2]
    if not commands:
        raise ToolServerError("has no command")
    return ["node", str(place / commands.get(wanted, next(iter(commands.values()))))]


def install_pypi(server: ToolServer, folder: Path) -> list[str]:
    command = folder / "bin" / (server.command or server.package)
    if not command.exists():
        run_installer([sys.executable, "-m", "venv", str(folder)], folder)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        run_installer([*pip, f"{server.package}=={server.version}", *server.companions], folder)
    return [str(command)]


def run_installer(command: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=INSTALL_TIMEOUT_S, check=False, text=True
        )
    except subprocess.TimeoutExpired as error:
        raise ToolServerError(f"not installed within {INSTALL_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.split("\n") if "rror" in line]
        raise ToolServerError(f"can't be installed: {(lines or [done.stderr])[0][:160]}")
