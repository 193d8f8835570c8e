"""Audits of one model: its probe, quarantine and auditor, and the choice among those of several models."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from warmline_proxy.audit.auditor import Auditor
from warmline_proxy.audit.bisect import Bisector
from warmline_proxy.audit.first_token_probe import FirstTokenProbe
from warmline_proxy.audit.quarantine import Quarantine
from warmline_proxy.audit.quiet import QuietEngine
from warmline_proxy.config import ProxyConfig
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.store.rows import SessionRow
from warmline_proxy.tasks import BackgroundTasks


@dataclass(frozen=True)
class AuditServices:
    """Services that the audits of all models share."""

    config: ProxyConfig
    index: Index
    registry: RequestRegistry
    saver: Saver
    metrics: ProxyMetrics
    background: BackgroundTasks
    tenants: Callable[[], Iterable[str]]
    work_lock: asyncio.Lock


@dataclass(frozen=True, eq=False)
class BackendAudits:
    """Audits of one model."""

    backend: Backend
    probe: FirstTokenProbe
    quarantine: Quarantine
    auditor: Auditor


def build_audits(backend: Backend, services: AuditServices) -> BackendAudits:
    index, metrics, registry = services.index, services.metrics, services.registry
    upstream, state = backend.upstream, backend.state
    probe = FirstTokenProbe(upstream, index, state.resident_view, services.tenants)
    engine = QuietEngine(registry, backend.watchdog, work_lock=services.work_lock)
    bisector, background = Bisector(index, probe, engine), services.background
    quarantine = Quarantine(index, upstream, state, registry, services.saver, bisector, metrics, background)
    auditor = Auditor(
        config=services.config,
        index=index,
        probe=probe,
        quarantine=quarantine,
        engine=engine,
        metrics=metrics,
        rng=random.Random(),
    )
    return BackendAudits(backend, probe, quarantine, auditor)


@dataclass(frozen=True, eq=False)
class ModelAudits:
    """Audits of all models, in the order of their backends.  Event loop thread."""

    models: ServedModels
    audits: Sequence[BackendAudits]
    tenants: Callable[[], Iterable[str]]

    def start(self) -> None:
        for each in self.audits:
            each.auditor.start()

    async def stop(self) -> None:
        for each in self.audits:
            await each.auditor.stop()

    def count_waiting(self) -> int:
        return sum(each.auditor.waiting_count for each in self.audits)

    def consider_request(self, request: Request) -> None:
        """Have a saved request audited by its model's auditor; one without a model has computed nothing."""
        if (audits := self._find(request.assigned_backend)) is not None:
            audits.auditor.consider_request(request)

    def clear(self) -> None:
        """Drop what is known of conversations, for a purge."""
        for each in self.audits:
            each.quarantine.clear_history()
            each.auditor.drop_waiting()

    def find_by_session(self, row: SessionRow) -> BackendAudits:
        """Audits of the model of a conversation: of its namespace, else of its name, else of the default model, whose
        probe finds out that it is another one.
        """
        models = self.models
        backend = models.find_by_root(row.root, self.tenants()) or models.find(row.model) or models.default
        return next(each for each in self.audits if each.backend is backend)

    def _find(self, backend: Backend | None) -> BackendAudits | None:
        return next((each for each in self.audits if each.backend is backend), None)
