"""Reference answers: cold runs of long-lived backends that reuse nothing, of a tiny model of each cache family."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from support import tiny_models
from support.oracle.verdict import Difference
from support.pair.answers import (
    QUANTIZED_APART_FLAGS,
    QUANTIZED_FLAGS,
    TOLERANCE,
    TOLERANCE_QUANTIZED,
    TOLERANCE_QUANTIZED_APART,
)
from support.pair.pair import START_TIMEOUT_S, WARMLINE, Reply, send_request
from support.processes import RunningProcess, free_port
from warmline_common.storage.home import Home

STEP_TOKENS = 64
OTHER_STEPS_TOKENS = (37, 23, 11, 50, 29)


@dataclass(frozen=True)
class OracleFamily:
    """Model, its flags, and the tolerance between warm and cold log-probabilities.

    `steps`: it quantizes, or selects tokens or experts by scores.  Rounding decides near ties, and later values differ
    by a step, also between cold runs in other chunks.
    """

    name: str
    architecture: str
    flags: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    steps: bool = False

    def folder(self, root: Path) -> Path:
        """Build the model, once, with stop tokens; read-only."""
        return tiny_models.build(self.architecture, root / self.architecture, stops=True)


FAMILIES = {
    family.name: family
    for family in (
        *(OracleFamily(name, name) for name in ("llama", "gemma3", "qwen3_5", "falcon_h1", "baichuan_m1", "mamba2")),
        *(OracleFamily(name, name, steps=True) for name in ("deepseek_v32", "glm_moe_dsa")),
        OracleFamily("quantized", "llama", QUANTIZED_FLAGS, TOLERANCE_QUANTIZED, steps=True),
        OracleFamily("quantized_apart", "llama_wide", QUANTIZED_APART_FLAGS, TOLERANCE_QUANTIZED_APART, steps=True),
    )
}


class Reference:
    """Cold answers of one family: one backend, without a proxy, for each chunk length.

    It drafts nothing, except for exact mode, where the bits of an answer are those of the same drafts.
    """

    def __init__(self, family: OracleFamily, model: Path) -> None:
        self.family, self.model = family, model
        self._backends: dict[tuple[int, bool], ColdBackend] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Reference":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def compute_cold(self, body: Mapping[str, Any], *, is_exact: bool = False) -> Reply:
        return self._backend(STEP_TOKENS, drafts=is_exact).compute_cold(body)

    def compute_cold_runs(self, body: Mapping[str, Any], cut: int) -> list[Reply]:
        """Cold runs in the usual chunks, in others, and in chunks of `cut` tokens, where a warm run began."""
        runs = [self._backend(each).compute_cold(body) for each in (STEP_TOKENS, *OTHER_STEPS_TOKENS)]
        if cut:
            with self._run_backend(cut) as backend:
                runs.append(backend.compute_cold(body))
        return runs

    def _backend(self, step_tokens: int, *, drafts: bool = False) -> "ColdBackend":
        key = step_tokens, drafts
        if key not in self._backends:
            self._backends[key] = self._stack.enter_context(self._run_backend(step_tokens, drafts=drafts))
        return self._backends[key]

    @contextmanager
    def _run_backend(self, step_tokens: int, *, drafts: bool = False) -> Iterator["ColdBackend"]:
        port = free_port()
        own = ("--model", str(self.model), "--backend-port", str(port), *self.family.flags)
        own = own if drafts else (*own, "--speculation", "off")
        with tempfile.TemporaryDirectory(prefix="reference-") as folder:
            flags = ("--home", folder, *own, "--reuse", "off", "--prefill-step-size", str(step_tokens))
            with RunningProcess([WARMLINE, "backend", *flags]) as process:
                process.wait_for("serving .* at http://", START_TIMEOUT_S)
                yield ColdBackend(f"http://127.0.0.1:{port}", Home(Path(folder)).load_secret())


@dataclass(frozen=True)
class ColdBackend:
    """Backend that reuses nothing, without a proxy."""

    url: str
    secret: str

    def compute_cold(self, body: Mapping[str, Any]) -> Reply:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.secret}"}
        reply = send_request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        if reply.status != 200 or reply.cached:
            raise Difference(f"the reference answers {reply.raw!r}")
        return reply
