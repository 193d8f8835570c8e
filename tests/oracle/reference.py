"""Cold runs: what the answer is.  Real pairs that live long and reuse nothing, of a tiny model of each cache family."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from answers import TOLERANCE, TOLERANCE_QUANTIZED
from verdict import Difference

import tiny_models
from pair import Pair, Reply

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
        Family("deepseek_v32", "deepseek_v32", steps=True),
        Family("quantized", "llama", ("--kv-bits", "8", "--kv-group-size", "32"), TOLERANCE_QUANTIZED, steps=True),
    )
}


class Reference:
    """Answers one family's requests, cold; a pair for each length of chunks that is asked for."""

    def __init__(self, family: Family, model: Path) -> None:
        self.family, self.model = family, model
        self._pairs: dict[int, Pair] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Reference":
        self._pair(STEP_TOKENS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def cold(self, body: Mapping[str, Any]) -> Reply:
        return cold(self._pair(STEP_TOKENS), body)

    def cold_runs(self, body: Mapping[str, Any], cut: int) -> list[Reply]:
        """The same in chunks of other lengths, after it; the last in chunks of `cut` tokens, where a warm run began."""
        runs = [cold(self._pair(each), body) for each in (STEP_TOKENS, *OTHER_STEPS_TOKENS)]
        if cut:
            with tempfile.TemporaryDirectory() as folder, self._started(cut, Path(folder)) as pair:
                runs.append(cold(pair, body))
        return runs

    def _pair(self, step_tokens: int) -> Pair:
        if step_tokens not in self._pairs:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="reference-")))
            self._pairs[step_tokens] = self._stack.enter_context(self._started(step_tokens, folder))
        return self._pairs[step_tokens]

    def _started(self, step_tokens: int, folder: Path) -> Pair:
        flags = ("--reuse", "off", "--prefill-step-size", str(step_tokens), *self.family.flags)
        return Pair(folder, self.model, *flags)


def cold(pair: Pair, body: Mapping[str, Any]) -> Reply:
    reply = pair.post("/v1/chat/completions", body)
    if reply.status != 200 or reply.cached:
        raise Difference(f"the reference answers {reply.raw!r}")
    return reply
