"""Real pair of several models: `warmline serve` with a keeper, which starts a backend process for each loaded model."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from support.pair.pair import Message, Pair, Reply, send_request
from support.pair.waiting import wait_until
from warmline_common.protocol.keeper import ModelsReply, ModelStage, ModelStatus
from warmline_common.protocol.messages import BackendStatus, decode

ANSWER_MAX_S = 30.0
POLL_WAIT_S = 5.0
READY_MAX_S = 90.0  # beside other tests
UNREACHABLE_ERRORS = (OSError, http.client.HTTPException)
KEEPER, PROXY = "keeper", "proxy"


@dataclass(frozen=True)
class PairModel:
    """One of `[[models]]`; `settings`: its backend's own ones."""

    name: str
    folder: Path
    aliases: Sequence[str] = ()
    pinned: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)

    def make_entry(self) -> dict[str, object]:
        aliases = list(self.aliases)
        return {
            "name": self.name,
            "path": str(self.folder),
            "aliases": aliases,
            "pinned": self.pinned,
            **self.settings,
        }


class ModelsPair(Pair):
    """Proxy, keeper and backends over one home.  `memory_gb` for all models; the first is the default one.

    `memory_gb`, `stay_s` and `models` count from the next start on.  Sizes of models that another pair of this process
    has read are handed on: to read one takes a second or two, and a size counts for as long as its files are the same.
    """

    _sizes: ClassVar[dict[str, Any]] = {}  # entries of sizes.json

    def __init__(
        self,
        home: Path,
        models: Sequence[PairModel],
        *flags: str,
        memory_gb: float,
        stay_s: float = 1.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(home, Path(), *flags, environment=environment)
        self.models, self.memory_gb, self.stay_s = list(models), memory_gb, stay_s

    def start(self) -> Self:
        if self._sizes and not self._sizes_file.exists():
            self.home.prepare()
            self._sizes_file.write_text(json.dumps(self._sizes))
        return super().start()

    def stop(self) -> None:
        super().stop()
        if self._sizes_file.exists():
            self._sizes.update(json.loads(self._sizes_file.read_text()))

    @property
    def _sizes_file(self) -> Path:
        return self.home.models / "sizes.json"

    @property
    def _model_flags(self) -> Sequence[str]:
        entries = [model.make_entry() for model in self.models]
        options = ["--models-memory-gb", f"{self.memory_gb:.6f}", "--model-stay-s", f"{self.stay_s:g}"]
        return ["--models", json.dumps(entries), *options]

    # ---- asking

    def ask_cold(self, name: str, messages: list[Message], **options: object) -> Reply:
        """Answer of a loaded model's backend, which is asked directly and then reuses nothing."""
        body = json.dumps({"messages": messages, **options}).encode()
        return self.as_owner("POST", self.model_url(name) + "/v1/chat/completions", body)

    def load_all(self) -> None:
        """Load all models, where there is room, by their owner's request."""
        for model in self.models:
            self.set_loaded(model.name, True)

    def set_loaded(self, name: str, is_loaded: bool) -> None:
        """Load or unload a model, by its owner's request, and wait until it is."""
        verb = "load" if is_loaded else "unload"
        reply = self.as_owner("POST", f"{self.url}/warmline/models/{name}/{verb}")
        assert reply.status == 200, reply.raw

    # ---- looking inside

    def fetch_models(self, version: int = -1) -> ModelsReply:
        """State of the keeper, once its version is another one.  Raises one of UNREACHABLE_ERRORS."""
        url = f"{self.backend_url}/keeper/models?version={version}&wait_s={POLL_WAIT_S}"
        headers = {"Authorization": f"Bearer {self.home.load_secret()}"}
        return decode(send_request(url, None, headers, "GET", POLL_WAIT_S + ANSWER_MAX_S).raw, ModelsReply)

    def find_model(self, name: str) -> ModelStatus:
        return next(model for model in self.fetch_models().models if model.name == name)

    def served_models(self) -> dict[str, Any]:
        """Models of GET /warmline/models, by name."""
        reply = self.as_owner("GET", f"{self.url}/warmline/models")
        return {model["name"]: model for model in reply.json["models"]}

    def check_answered(self, *expected: tuple[str, str]) -> None:
        """Check model and client's name for it of the last requests; their records are written a little later."""
        wait_until(lambda: self._list_answered(len(expected)) == list(expected), f"not answered so: {expected}")

    def _list_answered(self, count: int) -> list[tuple[str, str]]:
        rows = self.as_owner("GET", f"{self.url}/warmline/requests?count={count}").json["requests"]
        return [(row["model"], row["client_model"]) for row in reversed(rows)]

    def count_starts(self) -> int:
        """Starts of all models' processes since the keeper's start."""
        return sum(model.starts for model in self.fetch_models().models)

    def model_url(self, name: str) -> str:
        """Address of a loaded model's backend."""
        port = self.find_model(name).port
        assert port, f"{name} is not loaded"
        return f"http://127.0.0.1:{port}"

    def model_status(self, port: int) -> BackendStatus:
        """Status of the backend at a port.  Raises one of UNREACHABLE_ERRORS."""
        headers = {"Authorization": f"Bearer {self.home.load_secret()}"}
        return decode(
            send_request(f"http://127.0.0.1:{port}/kv/status", None, headers, "GET", ANSWER_MAX_S).raw, BackendStatus
        )

    def read_step_bytes(self) -> dict[str, int]:
        """Memory of a prefill step of each model, by its name, as the keeper has read it."""
        entries = json.loads(self._sizes_file.read_text())
        sizes = {json.loads(key)[0]: entry["size"]["step_bytes"] for key, entry in entries.items()}
        return {model.name: int(sizes[str(model.folder)]) for model in self.models}

    def find_memory_gb(self, count: int) -> float:
        """Memory with room for any `count` of the models and for no more."""
        needs = self._read_needs()
        memory_bytes = 1.05 * sum(needs[-count:])
        assert memory_bytes < sum(needs[: count + 1]), "there would be room for more"
        return memory_bytes / 1e9

    def check_room(self, count: int) -> None:
        """Check that the memory has room for any `count` of the models and for no more."""
        needs = self._read_needs()
        assert sum(needs[-count:]) <= self.memory_gb * 1e9 < sum(needs[: count + 1]), needs

    def _read_needs(self) -> list[int]:
        """Bytes that each model needs, the least first, once the keeper has read all sizes."""

        def list_needs() -> list[int]:
            return sorted(model.need_bytes for model in self.fetch_models().models)

        wait_until(lambda: all(list_needs()), "the sizes are not read", READY_MAX_S)
        return list_needs()

    # ---- processes

    @property
    def serve_pid(self) -> int:
        assert self._serve is not None
        return self._serve.process.pid

    def process_pids(self) -> dict[str, int]:
        """Pids of serve, keeper, proxy, and of the backends by the model's name, as far as they run."""
        found = {"serve": self.serve_pid, KEEPER: self.keeper_pid(), PROXY: self._read_pid(PROXY)}
        with contextlib.suppress(*UNREACHABLE_ERRORS):
            found |= {model.name: model.pid for model in self.fetch_models().models}
        return {name: pid for name, pid in found.items() if pid}

    def keeper_pid(self) -> int:
        """Pid of the keeper by its own word, 0 while it does not answer: files with pids may be stale."""
        with contextlib.suppress(*UNREACHABLE_ERRORS):
            return int(send_request(f"{self.backend_url}/health", None, {}, "GET", ANSWER_MAX_S).json["pid"])
        return 0

    def kill_process(self, name: str) -> int:
        """Kill the keeper, the proxy or a model's backend with SIGKILL; its pid, 0 where there was none."""
        pid = self.process_pids().get(name, 0)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    def kill(self) -> None:
        """Kill serve, keeper, proxy and all backends at once with SIGKILL, as a power cut does."""
        assert self._serve is not None
        for pid in self.process_pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._serve.process.wait()
        self._serve.wait_for_silence()

    def list_descendants(self) -> set[int]:
        """Pids of all processes that serve, or a process of it, has started, and which run."""
        parents = list_parents()
        found, added = set[int](), {self.serve_pid}
        while added:
            found |= added
            added = {pid for pid, parent in parents.items() if parent in added} - found
        return found

    def wait_until_recovered(self, killed_pid: int) -> None:
        """Wait until a killed process is gone, and proxy, keeper and a model are ready again."""
        wait_until(lambda: not is_alive(killed_pid), f"process {killed_pid} is still there", READY_MAX_S)
        wait_until(lambda: self.is_ready, "not ready again", READY_MAX_S)

    @property
    def is_ready(self) -> bool:
        with contextlib.suppress(*UNREACHABLE_ERRORS):
            is_up = send_request(f"{self.url}/ready", None, {}, "GET", ANSWER_MAX_S).status == 200
            return is_up and self.fetch_models().ready
        return False

    def wait_for_stage(self, name: str, stage: ModelStage) -> None:
        wait_until(lambda: self._read_stage(name) is stage, f"{name} is not {stage}", READY_MAX_S)

    def find_stage(self, name: str, stage: ModelStage, is_over: Callable[[], bool]) -> ModelStatus | None:
        """Wait for a short stage; the status at its begin, or None where it was not seen before `is_over()`."""
        version = -1
        while not is_over():
            reply = self.fetch_models(version)
            version, status = reply.version, next(model for model in reply.models if model.name == name)
            if status.stage is stage:
                return status
        return None

    def _read_stage(self, name: str) -> ModelStage | None:
        with contextlib.suppress(*UNREACHABLE_ERRORS):
            return self.find_model(name).stage
        return None

    def _read_pid(self, process: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self.pid(process)
        return 0


def list_parents() -> dict[int, int]:
    """Parents of all processes, zombies left out, by pid."""
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in lines.splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def is_alive(pid: int) -> bool:
    return pid in list_parents()
