"""Log of one request: its record and its PERF line."""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from warmline_common.process.redaction import quote_text
from warmline_common.protocol.messages import HEADER_REQUEST, GenerationResult, Timings
from warmline_common.protocol.waits import LOAD, PROMPT, add_waits, list_long_waits, sum_waits
from warmline_proxy.errors import CLIENT_CLOSED, ClientError, bad_request
from warmline_proxy.planner import COLD, RESTORED, RequestPlan
from warmline_proxy.store.rows import Divergence, RequestRecord, TtftParts
from warmline_proxy.upstream.client import UpstreamError, translate_upstream_error

OK, ERROR, CANCELLED = "ok", "error", "cancelled"
RECORD_FIELDS = (
    *("id", "endpoint", "client_model", "model", "session", "prompt_tokens", "saved_tokens"),
    *("restore_s", "ttft_s", "key", "root", "error", "dispatches"),
)
_REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")


def new_request_id() -> str:
    return secrets.token_hex(12)


def parse_request_id(header: str | None) -> str:
    """The client's id for its request, or a new one.  Raises ClientError 400."""
    if header is None:
        return new_request_id()
    if not _REQUEST_ID_PATTERN.fullmatch(header):
        shown = quote_text(header[:80])
        raise bad_request(f"The header {HEADER_REQUEST} must be 1 to 64 of A-Z a-z 0-9 . _ -, not {shown}.")
    return header


@dataclass
class RequestLog:
    """Facts of a request in progress, read when it settles.  Event loop thread."""

    endpoint: str
    id: str = field(default_factory=new_request_id)
    client_request_id: str = ""  # given by the client
    key: str = ""  # key name
    arrived_at: float = field(default_factory=time.time)
    arrived_monotonic: float = field(default_factory=time.monotonic)
    client_model: str = ""
    model: str = ""  # that serves it
    session_hint: str = ""
    stabilization: str = ""  # "times=2, ids=1": replacements in the prompt's head
    session: str = ""
    outcome: str = ""
    status: str = "none"  # class of the HTTP status, as "2xx"
    error: str = ""
    dispatches: int = 0  # to a backend; more than one after its loss
    plan: RequestPlan | None = None
    prompt_tokens: int = 0
    saved_tokens: int = 0
    collapse: str = ""  # finding of the repetition guard
    waits: dict[str, float] = field(default_factory=dict)  # seconds before it was dispatched, by reason
    restore_s: float = 0.0
    dispatched_s: float = 0.0  # from the arrival to the last dispatch; 0.0 before it
    lost_s: float = 0.0  # of earlier dispatches, which were lost
    prefill_began_s: float = 0.0  # from the arrival until the engine began; 0.0 before that
    ttft_s: float = 0.0
    total_s: float = 0.0
    generation_result: GenerationResult | None = None
    root: bytes = b""  # the prompt's namespace
    divergence: Divergence | None = None  # of the prompt from known prefixes

    def elapsed_s(self) -> float:
        return time.monotonic() - self.arrived_monotonic

    @contextmanager
    def measure_wait(self, reason: str) -> Iterator[None]:
        """Scope in which the request waits for `reason`, one of waits.py."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.waits[reason] = self.waits.get(reason, 0.0) + time.monotonic() - began_s

    def measure_load_s(self, waiting_since: float | None) -> float:
        """Seconds that it waited for its model; `waiting_since`: time.monotonic() where it still does."""
        present_s = time.monotonic() - waiting_since if waiting_since is not None else 0.0
        return self.waits.get(LOAD, 0.0) + present_s

    def add_waits(self, waits: Mapping[str, float]) -> None:
        self.waits = add_waits(self.waits, waits)

    def mark_dispatched(self) -> None:
        self.dispatched_s = self.elapsed_s()

    def record_lost_dispatch(self) -> None:
        """Count the time since the last dispatch as lost: the request will be dispatched again."""
        if self.dispatched_s:
            self.lost_s += self.elapsed_s() - self.dispatched_s
        self.dispatched_s = self.prefill_began_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds that it has waited so far, but for its rendering."""
        return self.queue_s - self.waits.get(PROMPT, 0.0) + self.lost_s

    @property
    def queue_s(self) -> float:
        """Seconds from the arrival for which the engine did not work on the request, restores apart."""
        return sum_waits(self.waits)

    def record_success(self) -> None:
        """Record that the client has its whole answer; an earlier failure stays."""
        if not self.outcome:
            self.outcome, self.status = OK, "2xx"

    def record_failure(self, error: ClientError | UpstreamError) -> None:
        """Record an error; 499 is a cancellation."""
        is_cancel = isinstance(error, ClientError) and error.status == CLIENT_CLOSED
        self.outcome, self.error = CANCELLED if is_cancel else ERROR, str(error)
        self.status = f"{translate_upstream_error(error).status // 100}xx"

    def build_record(self) -> RequestRecord:
        plan = self.plan or RequestPlan(COLD, 0)
        timings = self.generation_result.timings if self.generation_result else Timings()
        waits = add_waits(self.waits, timings.waits)
        # Fewer than planned if a followed request could not be copied at the planned position; and none where the
        # request ended before anything was computed after it.
        reuse = min(plan.reuse, self.prompt_tokens - timings.prefilled) if timings.prefilled else 0
        return RequestRecord(
            **{name: getattr(self, name) for name in RECORD_FIELDS},
            at=self.arrived_at,
            outcome=self.outcome or ERROR,
            source=plan.source,
            why_not_warmer=plan.why_not_warmer,
            cached_tokens=reuse,
            restored_tokens=reuse if plan.source == RESTORED else 0,
            prefilled_tokens=timings.prefilled,
            generated_tokens=timings.decoded,
            decode_passes=timings.passes,
            drafted_tokens=sum(count.drafted for count in timings.drafts.values()),
            accepted_tokens=sum(count.accepted for count in timings.drafts.values()),
            accepted_by_source={source: count.accepted for source, count in timings.drafts.items()},
            no_drafts=timings.no_drafts,
            queue_s=sum_waits(waits),
            waits=waits,
            prefill_s=timings.prefill_s,
            ttft_parts=self._build_parts(timings),
            decode_s=timings.decode_s,
            expected_ttft_s=plan.expected_ttft_s,
            expected_parts=plan.expected,
            decode_tokens_per_s=timings.decoded / timings.decode_s if timings.decode_s > 0 else 0.0,
            total_s=self.total_s or self.elapsed_s(),
            parting=self.divergence,
            guard=self.collapse,
        )

    def _build_parts(self, timings: Timings) -> TtftParts:
        """Parts of `ttft_s`: what the proxy measured before the dispatch, what the engine measured, and the rest."""
        render_s = self.waits.get(PROMPT, 0.0)
        before_s = render_s + self.waited_s + self.restore_s
        plan_s = max(0.0, self.dispatched_s - before_s)
        wait_s = self.waited_s + sum(timings.waits.values())
        first_step_s = self.ttft_s - (plan_s + render_s + self.restore_s + wait_s + timings.prefill_s)
        if first_step_s < 0.0:  # nothing came, or its turns include some after the first token
            wait_s, first_step_s = max(0.0, wait_s + first_step_s) if self.ttft_s else wait_s, 0.0
        return TtftParts(
            render_s=render_s,
            plan_s=plan_s,
            restore_s=self.restore_s,
            wait_s=wait_s,
            prefill_s=timings.prefill_s,
            first_step_s=first_step_s,
        )


# Private (prompt text), meaningless in a log, not known yet, or logged one by one.
UNLOGGED_FIELDS = ("parting", "root", "audit", "ttft_parts")
SECONDS_DIGITS = 6


def build_perf_fields(record: RequestRecord, session_hint: str = "") -> dict[str, object]:
    """Fields of the PERF event for JSON logs, with the records' names."""
    values = {name: getattr(record, name) for name in record.__struct_fields__ if name not in UNLOGGED_FIELDS}
    fields = {name: round(each, SECONDS_DIGITS) if isinstance(each, float) else each for name, each in values.items()}
    fields["waits"] = {reason: round(seconds, SECONDS_DIGITS) for reason, seconds in record.waits.items()}
    fields["expected_parts"] = {part: round(s, SECONDS_DIGITS) for part, s in record.expected_parts.list_named()}
    parts = {f"{part}_s": round(s, SECONDS_DIGITS) for part, s in record.ttft_parts.list_named()}
    return {"event": "perf", "request": fields.pop("id"), **fields, **parts, "client_session": session_hint}


def format_perf_line(record: RequestRecord, session_hint: str = "") -> str:
    """PERF line, `key=value`; texts of others are quoted."""
    numbers = (
        f"{_format_parts(record.ttft_parts)} ttft={record.ttft_s:.3f}s expected={record.expected_ttft_s:.3f}s"
        f" expected_parts={_format_parts(record.expected_parts, ':', ',')}"
        f" queue={record.queue_s:.3f}s total={record.total_s:.3f}s"
        f" decode={record.decode_tokens_per_s:.1f}tok/s"
        f" prompt={record.prompt_tokens} cached={record.cached_tokens} restored={record.restored_tokens}"
        f" prefilled={record.prefilled_tokens} generated={record.generated_tokens} saved={record.saved_tokens}"
        f" passes={record.decode_passes} drafted={record.drafted_tokens} accepted={record.accepted_tokens}"
    )
    if load_s := record.waits.get(LOAD, 0.0):
        numbers += f" load={load_s:.3f}s"
    if waits := list_long_waits(record.waits):
        numbers += f" waits={','.join(f'{reason}:{seconds:.3f}s' for reason, seconds in waits)}"
    if record.dispatches > 1:
        numbers += f" dispatches={record.dispatches}"
    session = record.session or "-"
    texts = f"miss={json.dumps(record.why_not_warmer)} model={json.dumps(record.model or record.client_model)}"
    client_model = record.client_model if record.client_model != record.model else ""
    others = {
        "client_model": client_model,
        "client_session": session_hint,
        "guard": record.guard,
        "error": record.error,
    }
    for name, text in others.items():
        if text:
            texts += f" {name}={json.dumps(text)}"
    return (
        f"PERF request={record.id} session={session} endpoint={record.endpoint} outcome={record.outcome}"
        f" source={record.source} {numbers} {texts}"
    )


def _format_parts(parts: TtftParts, equals: str = "=", space: str = " ") -> str:
    return space.join(f"{name}{equals}{seconds:.3f}s" for name, seconds in parts.list_named())
