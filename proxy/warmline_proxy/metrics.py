"""Prometheus metrics of the proxy.  Any thread may count; each proxy has its own registry.

Names and labels are stable and listed in docs/metrics.md.  Labels are fixed words: values sent by clients (model names,
ids, keys) never become labels.  Gauges of the present state are in `admin.metrics`.
"""

import re
import threading

import prometheus_client as prometheus
from aiohttp import web
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from warmline_common.process.version import version
from warmline_proxy.errors import ClientError, decode_error_body
from warmline_proxy.store.rows import RequestRecord

# From a warm first token (milliseconds) to a prefill (hours).
SECONDS_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0),
)
TOKEN_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
PART_S_MIN = 0.005  # a shorter part of a time to the first token is as good as none
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

COMPUTED = "computed"  # source of prompt tokens without reuse
OTHER = "other"
ERROR_CODES_MAX = 64  # distinct labels, the backend's codes included
_ERROR_CODE_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")

PHASE_BY_STAGE = {"prefilling": "prefill", "answering": "decode"}  # label of Request.status
# Limit that ended a request, by its error's code.
CANCEL_SOURCE_BY_CODE = {
    "deadline_exceeded": "total_timeout",
    "queue_timeout": "queue_timeout",
    "stalled": "stall_timeout",
    "client_too_slow": "slow_reader",
    "shutting_down": "shutdown",
}


class ProxyMetrics:
    """Counters and histograms by subject."""

    def __init__(self) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]  # extra metrics in plain text
        self._registry = registry = prometheus.CollectorRegistry()
        self._error_codes: set[str] = set()
        self._lock = threading.Lock()
        prometheus.ProcessCollector(registry=registry)  # Linux only
        prometheus.Info("warmline_build", "Which Warmline this is.", registry=registry).info({"version": version()})

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"warmline_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"warmline_{name}", about, registry=registry)

        def histogram(name: str, about: str, *labels: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
            return Histogram(f"warmline_{name}", about, labels, buckets=buckets, registry=registry)

        about = "Requests that were admitted and have ended."
        self._requests = counter("requests", about, "api", "outcome", "source", "status")
        self._errors = counter("errors", "Errors sent to clients.", "status", "code")
        self.unauthorized = counter("unauthorized", "Requests without a key, or with a wrong one.", "door")
        self._cancels = counter("cancels", "Requests that were ended before their answer was whole.", "phase", "by")
        self._dispatched_again = counter("dispatched_again", "Times that a lost backend made a request be sent again.")

        self._total = histogram("request_seconds", "From a request's arrival to the end of its answer.")
        self._queue = histogram("queue_seconds", "What requests waited for their turn, here and at the backend.")
        self._ttft = histogram("ttft_seconds", "From a request's arrival to its first token.", "source")
        self._restore = histogram("restore_seconds", "What requests spent restoring from disk, where they did.")
        self._prefill = histogram("prefill_seconds", "What computing the rest of prompts took.")
        self._decode = histogram("decode_seconds", "From the end of prefills to the last token of answers.")
        about = "Mean of an answer's tokens."
        self._per_token = histogram("time_per_output_token_seconds", about, buckets=TOKEN_SECONDS_BUCKETS)
        about = "Time to the first token, divided by the expected time."
        self._estimate = histogram("ttft_estimate_ratio", about, "source", buckets=RATIO_BUCKETS)
        about = "Error of the expected time to the first token, or of a part, as a share of the actual one."
        self._estimate_error = histogram("ttft_estimate_error_ratio", about, "part", buckets=ERROR_BUCKETS)
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts by where their KV came from.", "source")
        self._generated_tokens = counter("generated_tokens", "Tokens of answers.")

        self._saves = counter("saves", "Saves that are in the index.")
        self._saved_tokens = counter("saved_tokens", "Tokens whose KV was saved.")
        self._saved_bytes = counter("saved_bytes", "Bytes of the files that were saved.")
        self.persistent = gauge("persistent", "1 while KV can be saved, 0 while it can't.")
        self.save_failures = counter("save_failures", "Saves that failed.", "reason")
        self.restores = counter("restores", "Restores that requests have started.", "outcome")
        self._evictions = counter("evictions", "Files that were evicted.", "why")
        self._evicted_bytes = counter("evicted_bytes", "Bytes of files that were evicted.", "why")
        self.quarantined = counter("quarantined", "Files taken out of use, without those that build on them.", "reason")
        self.audits = counter("audits", "Warm requests that were computed again, cold.", "why", "outcome")
        self.audits_waiting = gauge("audits_waiting", "Warm requests that wait for a quiet moment to be audited.")
        about = "Prompts computed ahead, or a part of one."
        self._prewarms = counter("prewarms", about, "outcome", "source")
        about = "Tokens of prompts computed ahead, by where their KV came from."
        self._prewarm_tokens = counter("prewarm_tokens", about, "source")
        about = "From the start of a model's process to its use, where a request or the owner asked for it."
        self.model_load_seconds = histogram("model_load_seconds", about)
        self.persistent.set(1)
        self._export_zeros()

    def _export_zeros(self) -> None:
        """Export the known labels of these with the value 0."""
        for family, values in (
            (self.unauthorized, ("client", "owner")),
            (self.restores, ("ok", "failed")),
            (self._evictions, ("budget", "disk_full")),
            (self._evicted_bytes, ("budget", "disk_full")),
        ):
            for value in values:
                family.labels(value)

    def register(self, collector: Collector) -> None:
        """Add a collector to each scrape."""
        self._registry.register(collector)

    def render_exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Body of GET /metrics and its Content-Type: OpenMetrics if `accept` asks for it, or text."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def record_request(self, record: RequestRecord, status: str) -> None:
        """Count an admitted request that has ended; `status`: class of its HTTP status, "none" without an answer."""
        source = record.source
        self._requests.labels(api=record.endpoint, outcome=record.outcome, source=source, status=status).inc()
        self._dispatched_again.inc(max(0, record.dispatches - 1))
        self._total.observe(record.total_s)
        self._queue.observe(record.queue_s)
        if record.restore_s:
            self._restore.observe(record.restore_s)
        if record.prefilled_tokens:  # else nothing was computed, and nothing reused
            self._prefill.observe(record.prefill_s)
            self._prompt_tokens.labels(source=COMPUTED).inc(record.prefilled_tokens)
            if record.cached_tokens:
                self._prompt_tokens.labels(source=source).inc(record.cached_tokens)
        if record.generated_tokens:
            self._generated_tokens.inc(record.generated_tokens)
            self._decode.observe(record.decode_s)
            self._per_token.observe(record.decode_s / record.generated_tokens)
        if record.ttft_s:
            self._ttft.labels(source=source).observe(record.ttft_s)
        if record.ttft_s and record.expected_ttft_s and record.dispatches == 1:
            self._estimate.labels(source=source).observe(record.ttft_s / record.expected_ttft_s)
            self._observe_estimate_errors(record)

    def record_prewarm(self, record: RequestRecord) -> None:
        """Count a prompt that was computed ahead; the other metrics are those of clients' requests alone."""
        self._prewarms.labels(outcome=record.outcome, source=record.source).inc()
        self._prewarm_tokens.labels(source=COMPUTED).inc(record.prefilled_tokens)
        if record.cached_tokens:
            self._prewarm_tokens.labels(source=record.source).inc(record.cached_tokens)

    def _observe_estimate_errors(self, record: RequestRecord) -> None:
        actual = [("all", record.ttft_s), *record.ttft_parts.list_named()]
        expected = [("all", record.expected_ttft_s), *record.expected_parts.list_named()]
        for (part, actual_s), (_, expected_s) in zip(actual, expected, strict=True):
            if part == "all" or max(actual_s, expected_s) >= PART_S_MIN:
                self._estimate_error.labels(part=part).observe(abs(expected_s - actual_s) / max(actual_s, PART_S_MIN))

    def record_cancel(self, stage: str, cancel_source: str) -> None:
        """Count an ended request; `stage` as in `Request.status`, `cancel_source` as by `find_cancel_source`."""
        self._cancels.labels(phase=PHASE_BY_STAGE.get(stage, stage), by=cancel_source).inc()

    def record_error(self, error: ClientError) -> None:
        """Count an error sent to a client; its code is OTHER beyond ERROR_CODES_MAX."""
        body = decode_error_body(error)
        code = body.code or body.type
        with self._lock:
            has_room = code in self._error_codes or len(self._error_codes) < ERROR_CODES_MAX
            if has_room and _ERROR_CODE_PATTERN.fullmatch(code):
                self._error_codes.add(code)
            else:
                code = OTHER
        self._errors.labels(status=str(error.status), code=code).inc()

    def record_save(self, tokens: int, bytes_written: int) -> None:
        self._saves.inc()
        self._saved_tokens.inc(tokens)
        self._saved_bytes.inc(bytes_written)

    def record_eviction(self, why: str, file_count: int, bytes_count: int) -> None:
        self._evictions.labels(why=why).inc(file_count)
        self._evicted_bytes.labels(why=why).inc(bytes_count)


METRICS = web.AppKey("metrics", ProxyMetrics)


def find_cancel_source(error: ClientError) -> str:
    """Origin of a cancellation: a person, or the limit that the error's code names."""
    return error.cancel_source or CANCEL_SOURCE_BY_CODE.get(decode_error_body(error).code or "", OTHER)
