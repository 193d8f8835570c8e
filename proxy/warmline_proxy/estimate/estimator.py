"""Estimator of durations: it learns from the records of requests and from the backend's measurements."""

from collections.abc import Iterable

from warmline_common.measurement.duration_model import DurationModel, fit_durations
from warmline_common.measurement.recent_durations import RecentDurations, WorkDuration
from warmline_common.protocol.messages import BackendStatus, KvLayout
from warmline_proxy.estimate import costs as assumptions
from warmline_proxy.estimate.costs import Costs, compute_restore_bytes
from warmline_proxy.store.rows import RequestRecord

OK = "ok"  # outcome of a request
# Sizes at which an assumed shape stands: tokens, bytes, and tokens with their context.
PROMPT_SIZES = ((100, 0), (1_000, 0), (30_000, 0))
RESTORE_SIZES = ((1 << 20, 0), (1 << 30, 0))
CHUNK_SIZES = ((64, 32), (2_048, 1_024), (2_048, 30_000))
# A fit takes a fraction of a millisecond.
RECORDS_PER_FIT = 8
RECORDS_FITTED_AT_ONCE = 32


class DurationEstimator:
    """Durations of recent requests' parts.  Event loop thread."""

    def __init__(self) -> None:
        self._recent = _RecentParts()
        self._record_count = 0
        self._status: BackendStatus | None = None
        self.costs = Costs()

    def record_chunks(self, chunks: Iterable[WorkDuration]) -> None:
        """Learn from the chunks of a prompt, or of a part of it."""
        self._recent.add_chunks(chunks)
        self._fit_when_due()

    def record_request(self, record: RequestRecord) -> None:
        """Learn from a request that has ended, unless it failed, was sent again, or computed nothing."""
        if record.outcome == OK and record.dispatches == 1 and record.ttft_s and record.prefilled_tokens:
            self._recent.add_parts(record, self._status.layout if self._status else None)
            self._fit_when_due()

    def _fit_when_due(self) -> None:
        self._record_count += 1
        if self._record_count <= RECORDS_FITTED_AT_ONCE or self._record_count % RECORDS_PER_FIT == 0:
            self.costs = self._recent.fit(self._status)

    def update_status(self, status: BackendStatus) -> None:
        """Take what a started backend has measured; what requests of another model have taken is forgotten."""
        before, self._status = self._status, status
        if before and before.fingerprint != status.fingerprint:
            self._recent, self._record_count = _RecentParts(), 0
        if not before or before.boot != status.boot:
            self._recent.add_chunks(status.chunk_durations)
            self.costs = self._recent.fit(status)


class _RecentParts:
    def __init__(self) -> None:
        self._chunks = RecentDurations()  # by tokens and their context
        self._render, self._plan = RecentDurations(), RecentDurations()  # by the prompt's tokens
        self._restore = RecentDurations()  # by bytes
        self._first_step = RecentDurations()  # by the prompt's tokens

    def add_chunks(self, chunks: Iterable[WorkDuration]) -> None:
        for chunk in chunks:
            self._chunks.add(chunk)

    def add_parts(self, record: RequestRecord, layout: KvLayout | None) -> None:
        parts, tokens = record.ttft_parts, record.prompt_tokens
        self._render.add(WorkDuration(amount=tokens, seconds=parts.render_s))
        self._plan.add(WorkDuration(amount=tokens, seconds=parts.plan_s))
        self._first_step.add(WorkDuration(amount=tokens, seconds=parts.first_step_s))
        if record.restored_tokens and layout:
            size = compute_restore_bytes(layout, record.restored_tokens)
            self._restore.add(WorkDuration(amount=size, seconds=parts.restore_s))

    def fit(self, status: BackendStatus | None) -> Costs:
        restore, first_step = assumptions.RESTORE_ASSUMED, assumptions.FIRST_STEP_ASSUMED
        if status and status.restore_bytes_per_s:
            restore = DurationModel(restore.fixed_s, 1 / status.restore_bytes_per_s)
        if status and status.decode_step_s:
            first_step = DurationModel(status.decode_step_s + assumptions.CALL_ASSUMED_S, first_step.unit_s)
        return Costs(
            chunk=fit_durations(self._chunks.list_usual(), assumptions.CHUNK_ASSUMED, CHUNK_SIZES),
            step_tokens=status.prefill_step_size if status else assumptions.STEP_TOKENS_ASSUMED,
            decode_step_s=status.decode_step_s if status else 0.0,
            render=fit_durations(self._render.list_usual(), assumptions.RENDER_ASSUMED, PROMPT_SIZES),
            plan=fit_durations(self._plan.list_usual(), assumptions.PLAN_ASSUMED, PROMPT_SIZES),
            restore=fit_durations(self._restore.list_usual(), restore, RESTORE_SIZES),
            first_step=fit_durations(self._first_step.list_usual(), first_step, PROMPT_SIZES),
        )
