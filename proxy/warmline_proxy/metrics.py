"""What the proxy counts, for Prometheus.  Any thread may count; each proxy has a registry of its own."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Counters and gauges by what they are about; names and labels are a promise to whoever scrapes them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "warmline_requests", "Requests that were answered or ended", ["outcome", "source"], registry=registry
        )
        self.persistent = Gauge(
            "warmline_persistent", "1 while what is computed can be saved, 0 while it can't", registry=registry
        )
        self.save_failures = Counter("warmline_save_failures", "Saves that failed", ["reason"], registry=registry)
        self.quarantined = Counter(
            "warmline_quarantined",
            "Files taken out of use, without those that build on them",
            ["reason"],
            registry=registry,
        )
        self.audits = Counter(
            "warmline_audits", "Warm requests that were computed again, cold", ["why", "outcome"], registry=registry
        )
        self.audits_waiting = Gauge(
            "warmline_audits_waiting", "Warm requests that wait for a quiet moment to be audited", registry=registry
        )
        self.persistent.set(1)

    def exposition(self) -> bytes:
        """The text that GET /metrics answers with."""
        return generate_latest(self._registry)
