"""Backend of one model as the proxy sees it: calls, state, watchdog, admission and gate."""

from dataclasses import dataclass, field

from warmline_common.protocol.messages import GenerationResult
from warmline_common.settings.models import ModelConfig
from warmline_proxy.models.admission import AdmissionQueue
from warmline_proxy.models.gate import ModelGate
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.watchdog import Watchdog


@dataclass(eq=False)
class Backend:
    """Parts that belong to one model's backend process.  Event loop thread."""

    upstream: Upstream
    watchdog: Watchdog
    state: BackendState
    admission: AdmissionQueue
    gate: ModelGate = field(default_factory=lambda: ModelGate(is_open=True))
    model: ModelConfig | None = None  # None: the only one of a pair, whatever it serves

    @property
    def name(self) -> str:
        """Name of the model: the configured one, else as the backend says; "" before its first status."""
        return self.model.name if self.model else self.state.model

    def describe_load_wait(self) -> str:
        """Why requests wait for the model to be loaded, for an error."""
        reason = self.gate.down_reason if self.gate.down_since is not None else self.gate.wait_reason
        return f"the model {self.name!r} is not loaded yet" + (f", since {reason}" if reason else "")

    async def cancel(self, request_id: str) -> GenerationResult | None:
        """Cancel a request; as `Upstream.cancel`, for as long as a step may take."""
        return await self.upstream.cancel(request_id, self.watchdog.cancel_timeout_s)

    async def finish_prefill(self, request_id: str) -> GenerationResult | None:
        """As `Upstream.finish_prefill`, for as long as a step may take."""
        return await self.upstream.finish_prefill(request_id, self.watchdog.cancel_timeout_s)

    @property
    def is_usable(self) -> bool:
        """True while its process is to be asked: it is loaded, or starts, as far as is known."""
        return self.upstream.has_address
