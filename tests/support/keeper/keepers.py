"""Keepers in tests: a real process over stand-in backends, and calls to it."""

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.processes import RunningProcess, free_port
from warmline_common.process.parent_watch import PARENT_PIPE
from warmline_common.protocol.keeper import POLL_WAIT_S_MAX, ModelsReply, ModelStage, ModelStatus
from warmline_common.protocol.messages import decode
from warmline_common.storage.file_lock import find_lock_holder
from warmline_common.storage.home import Home

DRIVER = str(Path(__file__).with_name("run_keeper.py"))
MB = 10**6


class ModelFolder:
    """Folder of a stand-in model; sizes in MB."""

    def __init__(self, root: Path, name: str, weights: int = 100, step: int = 10, kv: int = 20) -> None:
        self.name, self.path = name, root / "stand-ins" / name
        self.path.mkdir(parents=True)
        (self.path / "config.json").write_text("{}")
        (self.path / "sizes.json").write_text(json.dumps([weights * MB, step * MB, kv * MB]))

    def set(self, name: str, text: str = "") -> None:
        (self.path / name).write_text(text)

    def clear(self, name: str) -> None:
        (self.path / name).unlink()

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        file = self.path / "events"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in lines if not kind or line["event"] == kind]


class RunningKeeper(RunningProcess):
    """Keeper of models, by their folders and options of `[[models]]`; `memory_mb` for all."""

    def __init__(
        self,
        root: Path,
        models: dict[ModelFolder, dict[str, object]],
        memory_mb: float = 1000,
        *more: str,
        parent_pipe: int | None = None,
        command: str = "backend",
        **variables: str,
    ) -> None:
        self.home, self.port = Home(root / "home"), free_port()
        entries = [{"name": each.name, "path": str(each.path), **options} for each, options in models.items()]
        words = ["--home", str(self.home.root), "--backend-port", str(self.port), "--models", json.dumps(entries)]
        words += ["--models-memory-gb", str(memory_mb / 1000)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WARMLINE_")}
        environment |= variables
        if parent_pipe is not None:
            environment[PARENT_PIPE] = str(parent_pipe)
        descriptors = [] if parent_pipe is None else [parent_pipe]
        super().__init__([sys.executable, DRIVER, command, *words, *more], environment, descriptors)

    def wait_until_listening(self) -> None:
        self.wait_for("INFO .*keeping models at")

    def call(self, path: str, body: object = None, secret: str | None = None) -> tuple[int, Any]:
        """Status and JSON of an answer; GET without a body."""
        bearer = self.home.read_secret() if secret is None else secret
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {bearer}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def load(self, name: str, kv_mb: float = 0) -> tuple[int, Any]:
        return self.call(f"/keeper/models/{name}/load", {"kv_bytes": int(kv_mb * MB)})

    def unload(self, name: str) -> tuple[int, Any]:
        return self.call(f"/keeper/models/{name}/unload", {})

    def pin(self, name: str, pinned: bool = True) -> tuple[int, Any]:
        return self.call(f"/keeper/models/{name}/pin", {"pinned": pinned})

    def read(self, version: int = -1, wait_s: float = 0) -> ModelsReply:
        status, answer = self.call(f"/keeper/models?version={version}&wait_s={wait_s}")
        assert status == 200, answer
        reply = decode(json.dumps(answer).encode(), ModelsReply)
        held = [each for each in reply.models if each.kv_bytes]
        needs = sum(each.need_bytes for each in held)
        assert sum(each.kv_bytes for each in held) + needs - 20 * MB * len(held) <= reply.memory_bytes
        return reply

    def wait_until(self, is_reached: Callable[[ModelsReply], object]) -> ModelsReply:
        """Wait, change by change, for a state."""
        reply = self.read()
        while not is_reached(reply):
            before, reply = reply.version, self.read(reply.version, POLL_WAIT_S_MAX)
            assert reply.version != before, f"nothing changes any more: {reply}"
        return reply

    def status(self, name: str) -> ModelStatus:
        return find_status(self.read(), name)

    def wait_for_stage(self, name: str, stage: ModelStage) -> ModelStatus:
        return find_status(self.wait_until(lambda reply: find_status(reply, name).stage is stage), name)

    def wait_for_pid(self, name: str) -> int:
        """Pid of a model's process, once it has one."""
        return find_status(self.wait_until(lambda reply: find_status(reply, name).pid), name).pid

    def wait_for_budgets(self, **budgets_mb: float) -> ModelsReply:
        def is_reached(reply: ModelsReply) -> bool:
            return all(find_status(reply, name).kv_bytes == mb * MB for name, mb in budgets_mb.items())

        return self.wait_until(is_reached)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.wait_for_silence()
        return self.process.wait()


def find_status(reply: ModelsReply, name: str) -> ModelStatus:
    return next(each for each in reply.models if each.name == name)


def list_lock_holders(home: Home) -> list[str]:
    return [holder for lock in home.run.glob("backend*.lock") if (holder := find_lock_holder(lock))]
