"""Prometheus metrics of the backend.  Names and labels are stable and listed in docs/metrics.md.

The engine thread takes no lock for them: its counts are in its last snapshot.  Label values are fixed words, and the
served model's name.
"""

import errno
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from warmline_backend.engine.engine import Engine
from warmline_backend.generation.step_stats import StepHistogram
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.kv_cache.residents import ResidentNotFoundError
from warmline_backend.kv_cache.segment_io import BadChainError, DamagedFileError, OperationCancelledError
from warmline_backend.scheduler.capacity import KvTooLargeError
from warmline_common.process.version import version
from warmline_common.protocol.messages import BackendStatus

PREFIX = "warmline_backend_"
# 0.5 GB/s is a good disk, and a conversation may have 100 GB.
TRANSFER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
RENDER_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
FAILURE_REASONS: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((OperationCancelledError, CancelledError), "cancelled"),
    ((ResidentNotFoundError, RowsUnavailableError), "gone"),
    ((KvTooLargeError,), "too_large"),
    ((BadChainError,), "bad_chain"),
)


class TransferMetrics:
    """Durations, bytes and failures of restores, or of saves.  Any thread."""

    def __init__(self, name: str, about: str, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            f"{PREFIX}{name}_seconds", f"{about}, start to end.", buckets=TRANSFER_SECONDS, registry=registry
        )
        self._bytes = Counter(f"{PREFIX}{name}_bytes", f"Bytes of files: {about}.", registry=registry)
        self._failures = Counter(
            f"{PREFIX}{name}_failures", f"Ended without success: {about}.", ["reason"], registry=registry
        )

    def observe(self, bytes_moved: int, seconds: float) -> None:
        self._seconds.observe(seconds)
        self._bytes.inc(bytes_moved)

    @contextmanager
    def count_failures(self) -> Iterator[None]:
        """Count the block's failure by its reason."""
        try:
            yield
        except BaseException as error:
            self._failures.labels(reason=classify_failure(error)).inc()
            raise


def classify_failure(error: BaseException) -> str:
    """The reason label of a failed restore or save."""
    if isinstance(error, DamagedFileError):
        return error.reason
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, "EIO")
    return next((reason for kinds, reason in FAILURE_REASONS if isinstance(error, kinds)), "other")


class BackendMetrics(Collector):
    """Metrics recorded at events, on any thread but the engine's; a scrape adds the engine's last snapshot."""

    def __init__(self, engine: Engine, read_status: Callable[[], BackendStatus]) -> None:
        self._engine, self._read_status = engine, read_status
        disable_created_metrics()  # type: ignore[no-untyped-call]  # each would be a metric of its own in plain text
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # of Linux
        Info(f"{PREFIX}build", "Which Warmline this is.", registry=registry).info({"version": version()})
        self.restores = TransferMetrics("restore", "Restores from disk", registry)
        self.saves = TransferMetrics("save", "Saves to disk", registry)
        self._render_seconds, self._compile_seconds = (
            Histogram(PREFIX + name, about, buckets=RENDER_SECONDS, registry=registry)
            for name, about in (
                ("render_seconds", "Checking, rendering and tokenizing a body."),
                ("grammar_compile_seconds", "Compiling a grammar that was not at hand."),
            )
        )
        registry.register(self)

    def render_exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Body and Content-Type of GET /metrics: OpenMetrics if `accept` asks for it, else text."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def time_render(self) -> AbstractContextManager[object]:
        """Time the rendering of one prompt, refused or not."""
        return self._render_seconds.time()

    def observe_compile(self, seconds: float) -> None:
        """Record the compilation of a grammar."""
        self._compile_seconds.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Metrics of the engine and the process, read at a scrape."""
        status, heartbeat, snapshot = self._read_status(), self._engine.heartbeat, self._engine.snapshot
        stats = snapshot.step_stats
        kv_dtype = status.layout.dtype if status.layout else ""
        labels = {"model": status.model, "fingerprint": status.fingerprint, "kv_dtype": kv_dtype}
        info = GaugeMetricFamily(f"{PREFIX}model_info", "The served model.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info
        yield _gauge("ready", "1 while the model is loaded and the engine lives.", status.ready)
        yield _gauge("weight_bytes", "Bytes of the model's weights.", snapshot.weight_bytes)
        yield _gauge("context_tokens_max", "The model's context; 0 where it doesn't say.", status.context_tokens_max)
        yield _gauge("prefill_step_tokens", "The most tokens of a chunk.", status.prefill_step_size)
        yield _gauge("generations_running", "Generations that prefill or decode.", status.running)
        yield _gauge("generations_queued", "Generations that wait for their turn.", status.queued)
        ends = CounterMetricFamily(f"{PREFIX}generations", "Generations that have ended.", labels=["finish"])
        for finish, count in stats.finish_counts.items():
            ends.add_metric([finish], count)
        yield ends
        yield _gauge("residents", "KV in memory between two requests.", status.residents)
        yield _counter("residents_dropped", "Residents evicted to free memory.", snapshot.generation)
        kinds = {"prefill": stats.chunk_seconds, "decode": stats.decode_seconds, "other": stats.command_seconds}
        yield _histograms("step_seconds", "Steps of the engine.", "kind", kinds)
        yield _histograms("decode_batch_sequences", "Sequences in a decode step.", "", {"": stats.batch_sizes})
        yield _counter("prefilled_tokens", "Tokens of prompts that were computed.", stats.prefilled_tokens)
        yield _counter("decoded_tokens", "Tokens that were generated.", stats.decoded_tokens)
        for name, about, counts in (
            ("draft_tokens", "Tokens drafted, by source.", stats.drafted_tokens),
            ("draft_tokens_accepted", "Tokens drafted that were right, by source.", stats.accepted_tokens),
        ):
            drafts = CounterMetricFamily(f"{PREFIX}{name}", about, labels=["source"])
            for source, tokens in counts.items():
                drafts.add_metric([source], tokens)
            yield drafts
        yield _counter("redraws", "Answers taken back to an earlier token, to fit their schema.", stats.redraws)
        yield _counter("failed_steps", "Steps that failed, with all in their batch.", stats.failed_steps)
        yield _counter("keepalive_steps", "Tokens computed to keep an idle device ready.", snapshot.keepalive_steps)
        yield _gauge("step_age_seconds", "How long the present step has been going on.", heartbeat.step_age_s)
        yield _gauge("slowest_recent_step_seconds", "The slowest step of late.", snapshot.slowest_recent_step_s)
        yield _gauge("memory_budget_bytes", "What the KV of all may take.", status.memory_budget_bytes)
        yield _gauge("resident_bytes", "KV of residents.", status.resident_bytes)
        yield _gauge("running_bytes", "KV of generations, with the memory reserved for them.", status.running_bytes)
        yield _gauge("memory_active_bytes", "What mlx holds, weights included.", snapshot.memory_active_bytes)
        yield _gauge("memory_cache_bytes", "Freed buffers that mlx keeps.", snapshot.memory_cache_bytes)
        yield _gauge("memory_peak_bytes", "The most that mlx has held.", snapshot.memory_peak_bytes)
        about = "Prefill as last measured, by context length."
        prefill = GaugeMetricFamily(f"{PREFIX}prefill_tokens_per_second", about, labels=["context"])
        for rate in status.prefill_rates:
            prefill.add_metric([str(rate.tokens)], rate.tokens_per_s)
        yield prefill
        yield _gauge("decode_tokens_per_second", "Decoding as last measured.", status.decode_tokens_per_s)
        yield _gauge("restore_bytes_per_second", "Restores as last measured.", status.restore_bytes_per_s)
        yield _gauge("save_bytes_per_second", "Saves as last measured.", status.save_bytes_per_s)
        yield _gauge("tasks", "Tasks of the event loop.", status.vitals.tasks)
        yield _gauge("threads", "Threads of the process.", status.vitals.threads)
        yield _gauge("descriptors", "Files and sockets that the process has open.", status.vitals.descriptors)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, about, value=value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, about, value=value)


def _histograms(name: str, about: str, label: str, histograms: Mapping[str, StepHistogram]) -> Metric:
    """A histogram family; unlabelled where `label` is ""."""
    family = HistogramMetricFamily(PREFIX + name, about, labels=[label] if label else [])
    for word, spread in histograms.items():
        family.add_metric([word] if label else [], spread.buckets(), spread.sum)
    return family
