"""Costs of decode passes by width, measured once a model and device and remembered.  Engine thread."""

import logging
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from warmline_backend.engine.remembered import RememberedMeasurements
from warmline_backend.model.drafted_model import DraftModel
from warmline_backend.model.model import ServedModel
from warmline_backend.speculation.model_drafter import ModelDrafter, is_worth_asking
from warmline_backend.speculation.pass_costs import BATCH_TOKENS_MAX, PassCosts
from warmline_common.protocol.messages import convert

log = logging.getLogger(__name__)

FILE = "pass_costs.json"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, BATCH_TOKENS_MAX)
RUNS, STEP_RUNS = 2, 3  # of which the fastest counts: the first may compile kernels, and the machine may do other work
STEPS = 4  # in a row
CONTEXT_TOKENS = 64
DRAFT_STEPS = 8
PASS_S_MAX = 0.5  # wider passes are not measured where one takes longer: they are taken to lie on the same line

DRAFT_STEP = " draft"  # behind the fingerprint of both models
WidthSeconds = tuple[int, float]  # tokens of a pass, and its duration


def resolve_pass_costs(served: ServedModel, fingerprint: str, folder: Path) -> PassCosts | None:
    """Costs for this model on this machine, remembered in `folder` or measured now; None where that is impossible."""
    remembered = remember_pass_costs(folder)
    pairs, drafting = remembered.find(fingerprint), remembered.find(fingerprint + DRAFT_STEP)
    try:
        if pairs is None:
            log.info("measuring what decode passes cost, once for this model: it may take half a minute on a CPU")
            pairs = measure_seconds(served)
            remembered.remember(fingerprint, pairs)
        if drafting is None and served.draft is not None:
            drafting = [(1, measure_draft_step(served, served.draft))]
            remembered.remember(fingerprint + DRAFT_STEP, drafting)
    except RuntimeError as error:  # mlx's, such as memory that ran out
        log.warning("decode passes can't be timed, and nothing is drafted: %s", error)
        return None
    log.info("seconds of a decode pass by its tokens: %s", ", ".join(f"{n}: {seconds:.4f}" for n, seconds in pairs))
    costs = make_pass_costs(pairs, drafting[0][1] if drafting and served.draft is not None else 0.0)
    if costs.draft_step:
        log.info("a token of the draft model takes %.2f of a decode pass", costs.draft_step)
        if not is_worth_asking(costs):
            log.warning(
                "the draft model is too slow to gain anything: a token of it takes %.2f of a decode pass, by what was "
                "measured; its KV is computed all the same: choose a smaller one, or leave draft_model out",
                costs.draft_step,
            )
    return costs


def find_pass_costs(fingerprint: str, folder: Path) -> PassCosts | None:
    """Costs that are remembered for a model; None for none."""
    remembered = remember_pass_costs(folder)
    pairs, drafting = remembered.find(fingerprint), remembered.find(fingerprint + DRAFT_STEP)
    return make_pass_costs(pairs, drafting[0][1] if drafting else 0.0) if pairs is not None else None


def make_pass_costs(pairs: list[WidthSeconds], draft_step_s: float = 0.0) -> PassCosts:
    """Costs by what was measured; on CUDA passes get no other widths, since each new shape takes long once."""
    return PassCosts(dict(pairs), draft_step_s, WIDTHS if mx.cuda.is_available() else None)


def remember_pass_costs(folder: Path) -> RememberedMeasurements[list[WidthSeconds]]:
    """Measured passes of all models, by fingerprint; those of a draft model by this and DRAFT_STEP."""
    return RememberedMeasurements(folder / FILE, "the cost of decode passes", parse_seconds)


def parse_seconds(value: object) -> list[WidthSeconds] | None:
    """Widths and seconds as they are remembered; None for anything else."""
    try:
        pairs = convert(value, list[WidthSeconds])
    except msgspec.ValidationError:
        return None
    widths = [width for width, _ in pairs]
    is_valid = widths == list(WIDTHS[: len(widths)]) and all(0 < seconds < 1e6 for _, seconds in pairs)
    return pairs if widths and is_valid else None


def measure_seconds(served: ServedModel) -> list[WidthSeconds]:
    """Widths of passes, and the seconds that one takes after a short context."""
    layers = served.layout.make_empty_cache()
    mx.eval(served.model(_make_tokens(served, CONTEXT_TOKENS), cache=layers))
    pairs: list[WidthSeconds] = [(1, min(_time_step(served, layers) for _ in range(STEP_RUNS)))]
    for width in WIDTHS[1:]:
        seconds = min(_time_pass(served, layers, width) for _ in range(RUNS))
        pairs.append((width, seconds))
        if seconds > PASS_S_MAX:
            break
    return pairs


def _time_step(served: ServedModel, layers: list[Any]) -> float:
    """Seconds of a single step among others, each of which is sent before the token of the one before is read.

    A pass that verifies a draft can't be sent ahead: what follows depends on its tokens.
    """
    token = _send_step(served, layers, _make_tokens(served, 1))
    mx.eval(token)
    began = time.monotonic()
    token = _send_step(served, layers, token)
    for _ in range(STEPS - 1):
        following = _send_step(served, layers, token)
        mx.eval(token)
        token = following
    mx.eval(token)
    return max((time.monotonic() - began) / STEPS, 1e-9)


def _send_step(served: ServedModel, layers: list[Any], token: mx.array) -> mx.array:
    drawn = mx.argmax(served.model(token, cache=layers), axis=-1)
    mx.async_eval(drawn)  # type: ignore[no-untyped-call]
    return drawn


def _time_pass(served: ServedModel, layers: list[Any], width: int) -> float:
    began = time.monotonic()
    logits = served.model(_make_tokens(served, width), cache=layers)
    mx.eval(mx.argmax(logits, axis=-1))
    return max(time.monotonic() - began, 1e-9)


def measure_draft_step(served: ServedModel, draft: DraftModel) -> float:
    """Seconds that the draft model takes for a token of a draft, after a short context."""
    layers = served.layout.make_empty_cache()
    mx.eval(served.model(_make_tokens(served, CONTEXT_TOKENS), cache=layers))
    drafter = ModelDrafter(draft, served.vocabulary_size)
    return min(_time_draft(drafter, layers) for _ in range(RUNS))


def _time_draft(drafter: ModelDrafter, layers: list[Any]) -> float:
    began = time.monotonic()
    drafter.propose(layers, [[1]], DRAFT_STEPS)
    return max((time.monotonic() - began) / DRAFT_STEPS, 1e-9)


def _make_tokens(served: ServedModel, count: int) -> mx.array:
    """[1, count] varied tokens, for all experts."""
    return mx.array([[(n + 1) * 7919 % served.vocabulary_size for n in range(count)]])
