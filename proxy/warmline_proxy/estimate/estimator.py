"""Estimator of durations: it learns from the records of requests and from the backend's measurements."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from warmline_common.measurement.fitted_durations import FittedDurations, make_chunk_durations
from warmline_common.measurement.recent_durations import WorkDuration
from warmline_common.protocol.messages import BackendStatus
from warmline_proxy.estimate import costs as assumptions
from warmline_proxy.estimate.costs import Costs, compute_restore_bytes
from warmline_proxy.store.rows import RequestRecord

OK = "ok"  # outcome of a request
# Sizes at which an assumed shape stands: tokens, and bytes.
PROMPT_SIZES = ((100, 0), (1_000, 0), (30_000, 0))
RESTORE_SIZES = ((1 << 20, 0), (1 << 30, 0))


class DurationEstimator:
    """Durations of recent chunks, and of the other parts of recent requests.  Event loop thread.

    `list_history` gives the records of the last requests to a model, by its fingerprint, in order: what was learned
    before a restart is learned again.
    """

    def __init__(self, list_history: Callable[[str], Sequence[RequestRecord]] = lambda fingerprint: ()) -> None:
        self._list_history = list_history
        self._history_fingerprint = ""  # of the model whose history is known
        self._recent = _RecentParts()
        self._status: BackendStatus | None = None
        self._boot = ""  # of the backend whose own measurements are known

    def record_chunks(self, chunks: Iterable[WorkDuration]) -> None:
        """Learn from the chunks of a prompt, or of a part of it."""
        for chunk in chunks:
            self._recent.chunk.add(chunk)

    def record_request(self, record: RequestRecord) -> None:
        """Learn from a request that has ended, unless it failed, was sent again, or computed nothing."""
        if record.outcome != OK or record.dispatches != 1 or not (record.ttft_s and record.prefilled_tokens):
            return
        parts, tokens = record.ttft_parts, record.prompt_tokens
        self._recent.render.add(WorkDuration(amount=tokens, seconds=parts.render_s))
        self._recent.plan.add(WorkDuration(amount=tokens, seconds=parts.plan_s))
        self._recent.first_step.add(WorkDuration(amount=tokens, seconds=parts.first_step_s))
        if record.restored_tokens and self._status and self._status.layout:
            size = compute_restore_bytes(self._status.layout, record.restored_tokens)
            self._recent.restore.add(WorkDuration(amount=size, seconds=parts.restore_s))

    def _record_history(self, records: Sequence[RequestRecord]) -> None:
        step_tokens = self.costs.step_tokens
        for record in records:
            self.record_request(record)
        for record in list_lone_prefills(records):
            tokens = record.prefilled_tokens - 1  # the first step computes the last one
            count = -(-tokens // step_tokens)
            context = record.cached_tokens + tokens // 2
            chunk = WorkDuration(amount=tokens // count, context=context, seconds=record.prefill_s / count)
            self.record_chunks(count * [chunk])

    def update_status(self, status: BackendStatus) -> None:
        """Take what a started backend has measured; what requests of another model have taken is forgotten."""
        before = self._status
        if before and before.fingerprint != status.fingerprint:
            self._recent = _RecentParts()
        self._status = status
        if status.layout and self._history_fingerprint != status.fingerprint:  # no layout while it is loading
            self._history_fingerprint = status.fingerprint
            self._record_history(self._list_history(status.fingerprint))
        if self._boot != status.boot and status.chunk_durations:  # none while the model is loading
            self.record_chunks(status.chunk_durations)
            self._boot = status.boot
        if status.restore_bytes_per_s:
            self._recent.restore.assumed = replace(assumptions.RESTORE_ASSUMED, unit_s=1 / status.restore_bytes_per_s)
        if status.decode_step_s:
            fixed_s = status.decode_step_s + assumptions.CALL_ASSUMED_S
            self._recent.first_step.assumed = replace(assumptions.FIRST_STEP_ASSUMED, fixed_s=fixed_s)

    @property
    def costs(self) -> Costs:
        status = self._status
        return Costs(
            chunk=self._recent.chunk.model,
            restore=self._recent.restore.model,
            render=self._recent.render.model,
            plan=self._recent.plan.model,
            first_step=self._recent.first_step.model,
            step_tokens=(status and status.prefill_step_size) or assumptions.STEP_TOKENS_ASSUMED,  # 0: not chosen yet
            decode_step_s=status.decode_step_s if status else 0.0,
        )


def list_lone_prefills(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Records of answered prompts that were computed while no other request waited for its first token.

    The prefill of others may have been that of a batch.
    """
    ordered = sorted(records, key=lambda each: each.at)
    starts = [each.at for each in ordered[1:]] + [math.inf]
    # A request that was cancelled before its first token waited for it until its end.
    ends = (each.at + (each.ttft_s or each.total_s) for each in ordered)
    earlier_ends = accumulate(ends, max, initial=-math.inf)  # has one more, of all
    return [
        each
        for each, next_start, earlier_end in zip(ordered, starts, earlier_ends, strict=False)
        if each.outcome == OK
        and each.prefill_s > 0.0
        and each.prefilled_tokens > 1
        and earlier_end <= each.at <= next_start - each.ttft_s
    ]


class _RecentParts:
    """Recent durations of each part, with the size that it depends on."""

    def __init__(self) -> None:
        self.chunk = make_chunk_durations()
        self.render = FittedDurations(assumptions.RENDER_ASSUMED, PROMPT_SIZES)  # tokens of the prompt
        self.plan = FittedDurations(assumptions.PLAN_ASSUMED, PROMPT_SIZES)  # tokens of the prompt
        self.restore = FittedDurations(assumptions.RESTORE_ASSUMED, RESTORE_SIZES)  # bytes
        self.first_step = FittedDurations(assumptions.FIRST_STEP_ASSUMED, PROMPT_SIZES)  # tokens of the prompt
