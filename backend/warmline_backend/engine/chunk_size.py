"""`--prefill-step-size auto`: tokens per prefill step, measured once a model and remembered.

Longer steps are faster up to a point, and then only delay others: cancels and running streams wait for a step.  So the
smallest step is chosen that is nearly as fast as the best.  It is remembered, since in exact mode the step is the grid
of all stored KV.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from warmline_backend.engine.remembered import RememberedMeasurements
from warmline_backend.generation import sequence as sequences
from warmline_backend.generation.chunk_memory import ChunkMemory, compute_usable_bytes
from warmline_backend.generation.rates import Rates
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.model.loader import ModelError, read_config
from warmline_backend.model.model import MemoryLimits, ServedModel
from warmline_backend.model.step_memory import DEPTH_MAX, count_heads, fit_tokens, reckon_step_memory
from warmline_backend.request.params import GenerationParams
from warmline_backend.scheduler.capacity import sequence_tokens_max
from warmline_common.measurement.model_memory import KV_SHARE, compute_memory_budget
from warmline_common.protocol.tokens import TokenArray

log = logging.getLogger(__name__)

GRID_TOKENS_MIN = 256  # prefill in shorter chunks takes too long to be of use
STEPS = (256, 512, 1024, 2048, 4096, 8192)  # each twice the one before
NEAR_BEST = 0.97  # of the best speed
CHUNK_S_MAX = 10.0  # from an empty context; later chunks take longer
TRIAL_TOKENS = 64  # first trial, in case that the machine is too slow to measure more
RUNS = 2  # of which the faster counts: the first may compile kernels and page weights in
FILE = "prefill_steps.json"


@dataclass(frozen=True)
class ChunkTiming:
    seconds: float
    working_bytes: int  # peak memory beyond what was active before


@dataclass(frozen=True)
class ChunkLimits:
    tokens_max: int  # by the context and the memory for KV
    working_bytes_max: int  # of a chunk while it is computed


TimeChunks = Callable[[Sequence[int]], ChunkTiming]  # argument: lengths of consecutive chunks from the start


def resolve_step_size(
    served: ServedModel, fingerprint: str, memory: MemoryLimits, folder: Path, rates: Rates | None = None
) -> int:
    """The step for this model on this machine, remembered or measured now.  Engine thread.  Raises ModelError.

    `fingerprint` is the model's without a grid; the step is remembered in `folder`.  Chunks are recorded in `rates`.
    """
    measured_steps = RememberedMeasurements(folder / FILE, "the prefill step", _parse_step)
    if step := measured_steps.find(fingerprint):
        log.info("prefill step %d, as measured at an earlier start", step)
        return step
    log.info("measuring which prefill step is fastest; this is remembered")
    try:
        limits = compute_limits(served, memory)
        speeds = measure_speeds(lambda lengths: _time_and_record(served, lengths, rates or Rates()), limits)
    except RuntimeError as error:  # mlx's, such as memory that ran out
        raise ModelError(f"measuring the prefill step failed: {error}; give one, --prefill-step-size 1024") from error
    step = choose_step_size(speeds)
    by_step = ", ".join(f"{measured}: {speed:.0f}" for measured, speed in sorted(speeds.items()))
    log.info("prefill step %d; tokens/s by step: %s", step, by_step or "this machine is too slow to measure more")
    measured_steps.remember(fingerprint, step)
    return step


def _parse_step(value: object) -> int | None:
    return value if type(value) is int and value in STEPS else None


# ---- the choice


def choose_step_size(speeds: Mapping[int, float]) -> int:
    """The smallest step that is nearly as fast as the best; the smallest of all without measurements."""
    best = max(speeds.values(), default=0.0)
    return min((step for step, speed in speeds.items() if speed >= NEAR_BEST * best), default=STEPS[0])


def measure_speeds(time_chunks: TimeChunks, limits: ChunkLimits) -> dict[int, float]:
    """Tokens/s by step, as long as longer steps are faster and stay within the limits and CHUNK_S_MAX.

    Later tokens take longer, so steps are compared over the same tokens: one chunk against two of half its length.
    """
    step = STEPS[0]
    if limits.tokens_max < step:
        return {}
    last = time_chunks([TRIAL_TOKENS])
    if not _is_within_limits(limits, last, step // TRIAL_TOKENS):
        return {}
    last = time_chunks([step])
    speeds = {step: step / last.seconds}
    for longer in STEPS[1:]:
        if limits.tokens_max < longer or not _is_within_limits(limits, last, longer // step):
            break
        halves, last = time_chunks([step, step]), time_chunks([longer])
        if last.seconds > CHUNK_S_MAX or last.working_bytes > limits.working_bytes_max:
            break
        speeds[longer] = speeds[step] * halves.seconds / last.seconds
        if speeds[longer] <= speeds[step]:
            break
        step = longer
    return speeds


def _is_within_limits(limits: ChunkLimits, last: ChunkTiming, times: int) -> bool:
    """True where a chunk `times` longer should stay within the limits; attention's scores grow with the square."""
    return last.seconds * times <= CHUNK_S_MAX and last.working_bytes * times**2 <= limits.working_bytes_max


# ---- measuring


def compute_limits(served: ServedModel, memory: MemoryLimits) -> ChunkLimits:
    room = sequence_tokens_max(served, memory.budget_bytes)
    default_budget_bytes = compute_memory_budget(served.weight_bytes, memory.machine_bytes)
    usable_bytes = compute_usable_bytes(served.weight_bytes, memory.usable_bytes) - served.weight_bytes
    return ChunkLimits(
        tokens_max=min(room, served.context_tokens_max or room),
        working_bytes_max=min(int(default_budget_bytes * (1 - KV_SHARE) / KV_SHARE), usable_bytes),
    )


def time_chunks(served: ServedModel, lengths: Sequence[int]) -> ChunkTiming:
    """Prefill a prompt in chunks of these lengths, as requests are prefilled."""
    return min((_time_once(served, lengths) for _ in range(RUNS)), key=lambda timed: timed.seconds)


def _time_and_record(served: ServedModel, lengths: Sequence[int], rates: Rates) -> ChunkTiming:
    timing = time_chunks(served, lengths)
    if len(lengths) == 1:
        rates.record_chunk(lengths[0], lengths[0], timing.seconds)
    return timing


def _time_once(served: ServedModel, lengths: Sequence[int]) -> ChunkTiming:
    prompt = TokenArray(
        n * 7919 % served.vocabulary_size for n in range(sum(lengths) + 1)
    )  # varied tokens, for all experts
    params = GenerationParams(max_tokens=1)
    request = GenerationRequest("prefill step", prompt, params, lambda _: None, leaves_resident=False)
    sequence = sequences.Sequence(request, served.make_kv(journals=False), served)
    mx.clear_cache()
    mx.reset_peak_memory()
    before, began = mx.get_active_memory(), time.monotonic()
    for length in lengths:
        sequence.prefill_chunk(length)
    return ChunkTiming(max(time.monotonic() - began, 1e-9), mx.get_peak_memory() - before)


# ---- the memory of chunks


def make_chunk_memory(served: ServedModel, step: int, memory: MemoryLimits) -> ChunkMemory:
    """Reckon the memory of chunks of up to `step` tokens.  Engine thread."""
    heads = count_heads(read_config(served.path))
    longest = _find_longest_prompt(served, memory.budget_bytes)
    reckoned = reckon_step_memory(served.model, served.layout, heads, step, longest)
    return ChunkMemory(reckoned, compute_usable_bytes(served.weight_bytes, memory.usable_bytes))


def choose_grid(served: ServedModel, chunk_memory: ChunkMemory, step: int, memory: MemoryLimits) -> int:
    """The step for exact mode, where all chunks have one size: so short that it fits after the longest prompt.

    It is part of the fingerprint, so it goes by the memory that the model has alone.
    """
    longest = _find_longest_prompt(served, memory.budget_bytes)
    usable_bytes = compute_usable_bytes(served.weight_bytes, memory.machine_bytes)
    room = usable_bytes - served.weight_bytes - served.kv_bytes(longest)
    grid = fit_tokens(step, room, lambda tokens: chunk_memory.reckon_bytes(tokens, longest))
    grid = max(grid, min(step, GRID_TOKENS_MIN))
    if grid < step:
        log.warning(
            "prefill step %d instead of %d: in exact mode all chunks have one size, and after %d tokens one of %d "
            "takes %.1f GB of memory, of which %.1f GB are left beside weights and its KV",
            *(grid, step, longest, step, chunk_memory.reckon_bytes(step, longest) / 1e9, room / 1e9),
        )
    return grid


def _find_longest_prompt(served: ServedModel, memory_budget_bytes: int) -> int:
    room = sequence_tokens_max(served, memory_budget_bytes)
    return min(room, served.context_tokens_max or room, DEPTH_MAX)
