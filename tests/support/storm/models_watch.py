"""Watch of a pair of several models during a storm: memory, pinned models' processes, and saves that are durable."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from support.pair.models_pair import UNREACHABLE_ERRORS, ModelsPair
from support.storm.log import StormLog
from warmline_common.protocol.keeper import RUNNING, ModelsReply, ModelStage, ModelStatus

SAMPLE_INTERVAL_S = 0.05


@dataclass(eq=False)
class TalkTail:
    """Last answered turn of a conversation: tokens of its prompt, and those that are known to be on disk.

    `answered_at`: time.monotonic() of the answer's last byte; `pid`: of the backend that answered.
    """

    durable_tokens: int = 0
    answered_tokens: int = 0
    answered_at: float = 0.0
    pid: int = 0


@dataclass(eq=False)
class ModelsWatch(threading.Thread):
    """Thread that samples the keeper, its backends and the proxy until the log is released."""

    pair: ModelsPair
    log: StormLog
    tails: list[TalkTail]
    step_bytes: dict[str, int]
    memory_share_max: float = 0.0  # of the memory that models held at once
    kv_share_max: float = 0.0  # of a model's budget that its KV took
    samples: int = 0
    disturbed_until: float = 0.0  # end of the last recovery; inf from before a kill until the recovery from it
    pids: dict[str, int] = field(default_factory=dict)  # of loaded models
    seen_pids: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _kills: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))  # by boot and model
    _was_loaded: set[tuple[str, str]] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)  # problems, each told once

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.log.released.wait(SAMPLE_INTERVAL_S):
            self._note_durable()
            self._sample_keeper()

    def record_kill(self, boot: str, name: str) -> None:
        """Record a kill of a model's process that is about to happen."""
        with self.lock:
            self._kills[boot, name] += 1

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        """Scope of a kill and the recovery: what was not durable before it may be lost."""
        with self.lock:
            self.disturbed_until = inf
        yield
        with self.lock:
            self.disturbed_until = time.monotonic()

    # ---- saves

    def count_expected_tokens(self, tail: TalkTail) -> int:
        """Tokens that the next turn, answered just now, must have found: all of the turn before it, or only what was
        durable where something was killed since then.
        """
        with self.lock:
            return tail.answered_tokens if self.disturbed_until < tail.answered_at else tail.durable_tokens

    def _note_durable(self) -> None:
        """Note which turns are on disk: those answered before a moment at which nothing was to be saved any more."""
        began, disturbed_until = time.monotonic(), self.disturbed_until
        try:
            settling = self.pair.proxy_status()["settling"]
        except (*UNREACHABLE_ERRORS, ValueError, KeyError):
            return
        with self.lock:
            if settling or disturbed_until != self.disturbed_until:
                return
            for tail in self.tails:
                if disturbed_until < tail.answered_at < began:
                    tail.durable_tokens = tail.answered_tokens

    # ---- memory and processes

    def _sample_keeper(self) -> None:
        try:
            before = self.pair.fetch_models()
            used = {model.name: self._read_used_bytes(model) for model in before.models}
            after = self.pair.fetch_models()
        except (*UNREACHABLE_ERRORS, ValueError):
            return
        if before.boot != after.boot:
            return
        self.samples += 1
        self.pids = {model.name: model.pid for model in after.models if model.stage is ModelStage.LOADED}
        self.seen_pids |= {model.pid for model in after.models if model.pid}
        for reply in (before, after):
            self._check_total(reply)
            self._check_pins(reply)
        for one, other in zip(before.models, after.models, strict=True):
            self._check_used(one, other, used[one.name])

    def _read_used_bytes(self, model: ModelStatus) -> int:
        if model.stage is ModelStage.LOADED:
            try:
                status = self.pair.model_status(model.port)
            except (*UNREACHABLE_ERRORS, ValueError):
                return 0  # killed or unloaded meanwhile
            return status.resident_bytes + status.running_bytes
        return 0

    def _check_total(self, reply: ModelsReply) -> None:
        """Check that weights, steps and budgets of all models that hold memory are within it."""
        holders = [model for model in reply.models if model.kv_bytes]
        held = sum(model.weight_bytes + self.step_bytes[model.name] + model.kv_bytes for model in holders)
        self.memory_share_max = max(self.memory_share_max, held / reply.memory_bytes)
        if held > reply.memory_bytes:
            self._add_problem(f"models hold {held} of {reply.memory_bytes} bytes: {holders}")

    def _check_used(self, before: ModelStatus, after: ModelStatus, used: int) -> None:
        """Check a backend's own figure; a budget that was changed meanwhile counts as the larger one."""
        if used and before.pid == after.pid:
            budget = max(before.kv_bytes, after.kv_bytes)
            self.kv_share_max = max(self.kv_share_max, used / budget)
            if used > budget:
                self._add_problem(f"{before.name} has {used} bytes of KV, more than its budget: {before}, then {after}")

    def _check_pins(self, reply: ModelsReply) -> None:
        """Check that a pinned model's process was started again after kills of ours alone, and is never stopped."""
        for model in reply.models:
            if not model.pinned:
                continue
            key = reply.boot, model.name
            with self.lock:
                kills = self._kills[key]
            if model.starts > 1 + kills:
                self._add_problem(f"{model.name} is pinned and was started {model.starts} times, after {kills} kills")
            if key in self._was_loaded and model.stage not in RUNNING:
                self._add_problem(f"{model.name} is pinned and {model.stage}")
            if model.stage is ModelStage.LOADED:
                self._was_loaded.add(key)

    def _add_problem(self, problem: str) -> None:
        if (kind := problem.split(" of ")[0][:40]) not in self._told:
            self._told.add(kind)
            self.log.add_problem(problem)
