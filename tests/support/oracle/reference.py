"""Cold runs: what the answer is.  Backends that live long and reuse nothing, of a tiny model of each cache family."""

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
from support.pair.answers import TOLERANCE, TOLERANCE_QUANTIZED
from support.pair.pair import START_TIMEOUT_S, WARMLINE, Reply, ask
from support.processes import Running, free_port
from warmline_common.storage.home import Home

STEP_TOKENS = 64
OTHER_STEPS_TOKENS = (37, 23, 11, 50, 29)


@dataclass(frozen=True)
class Family:
    """A model, what it is served with, and how far its warm log-probabilities may be from its cold ones.

    `steps`: it quantizes, or chooses tokens or experts by their scores.  Where that is nearly tied, rounding decides,
    and what follows differs by a step: between cold runs in other chunks, too.
    """

    name: str
    architecture: str
    flags: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    steps: bool = False

    def folder(self, root: Path) -> Path:
        """Its model, whose answers may end by themselves; made once, and not to be written to."""
        return tiny_models.build(self.architecture, root / self.architecture, stops=True)


FAMILIES = {
    family.name: family
    for family in (
        *(Family(name, name) for name in ("llama", "gemma3", "qwen3_5", "falcon_h1", "baichuan_m1", "mamba2")),
        *(Family(name, name, steps=True) for name in ("deepseek_v32", "glm_moe_dsa")),
        Family("quantized", "llama", ("--kv-bits", "8", "--kv-group-size", "32"), TOLERANCE_QUANTIZED, steps=True),
    )
}


class Reference:
    """Answers one family's requests, cold; a backend for each length of chunks that is asked for, and no proxy."""

    def __init__(self, family: Family, model: Path) -> None:
        self.family, self.model = family, model
        self._backends: dict[int, Backend] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Reference":
        self._backend(STEP_TOKENS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def cold(self, body: Mapping[str, Any]) -> Reply:
        return self._backend(STEP_TOKENS).cold(body)

    def cold_runs(self, body: Mapping[str, Any], cut: int) -> list[Reply]:
        """The same in chunks of other lengths, after it; the last in chunks of `cut` tokens, where a warm run began."""
        runs = [self._backend(each).cold(body) for each in (STEP_TOKENS, *OTHER_STEPS_TOKENS)]
        if cut:
            with self._started(cut) as backend:
                runs.append(backend.cold(body))
        return runs

    def _backend(self, step_tokens: int) -> "Backend":
        if step_tokens not in self._backends:
            self._backends[step_tokens] = self._stack.enter_context(self._started(step_tokens))
        return self._backends[step_tokens]

    @contextmanager
    def _started(self, step_tokens: int) -> Iterator["Backend"]:
        port = free_port()
        own = ("--model", str(self.model), "--backend-port", str(port), *self.family.flags)
        with tempfile.TemporaryDirectory(prefix="reference-") as folder:
            flags = ("--home", folder, *own, "--reuse", "off", "--prefill-step-size", str(step_tokens))
            with Running([WARMLINE, "backend", *flags]) as process:
                process.wait_for("serving .* at http://", START_TIMEOUT_S)
                yield Backend(f"http://127.0.0.1:{port}", Home(Path(folder)).load_secret())


@dataclass(frozen=True)
class Backend:
    """One that reuses nothing, asked directly."""

    url: str
    secret: str

    def cold(self, body: Mapping[str, Any]) -> Reply:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.secret}"}
        reply = ask(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        if reply.status != 200 or reply.cached:
            raise Difference(f"the reference answers {reply.raw!r}")
        return reply
