"""Directory of the served models: the backend for a request, by the name that its client sent.  Event loop thread."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from warmline_common.protocol.tokens import namespace
from warmline_common.settings.models import ModelConfig
from warmline_proxy.errors import ClientError
from warmline_proxy.models.backend import Backend


@dataclass(eq=False)
class ServedModels:
    """Backends of all models; the first is the default.  `has_keeper` False: a pair of one model."""

    backends: Sequence[Backend]
    has_keeper: bool = False
    are_processes_known: bool = field(init=False)  # with a keeper: once it has said which models have one

    def __post_init__(self) -> None:
        self.are_processes_known = not self.has_keeper

    @property
    def default(self) -> Backend:
        return self.backends[0]

    @property
    def configs(self) -> list[ModelConfig]:
        """Several configured models; none in a pair of one."""
        return [backend.model for backend in self.backends if backend.model]

    @property
    def usable_backends(self) -> list[Backend]:
        """Backends that have a process, as far as is known."""
        return [backend for backend in self.backends if backend.is_usable]

    def choose(self, client_model: str | None) -> Backend:
        """Backend of the configured model of that name or alias; any other name means the default model."""
        return self.find(client_model or "") or self.default

    def names_model(self, client_model: str | None) -> bool:
        """True for a configured name or alias; with one model any name is its."""
        return not self.has_keeper or self.find(client_model or "") is not None

    def find(self, name: str) -> Backend | None:
        """Backend of a configured name or alias."""
        for backend in self.backends:
            if (model := backend.model) and (name == model.name or name in model.aliases):
                return backend
        return None

    def find_ready_backend(self) -> Backend:
        """Default backend, or while that is not up, another one that is."""
        up = [backend for backend in self.backends if backend.watchdog.is_up]
        return self.default if self.default in up or not up else up[0]

    def find_by_root(self, root: bytes, tenants: Iterable[str]) -> Backend | None:
        """Backend whose model computed what is stored under a namespace; None where none is known to."""
        known = [(backend, backend.state.fingerprint) for backend in self.backends if backend.state.fingerprint]
        roots = {namespace(fingerprint, tenant): backend for tenant in tenants for backend, fingerprint in known}
        return roots.get(root)

    def check_room(self, caller: str) -> None:
        """Raise ClientError where no model's queue has a place for a request of this caller."""
        errors: list[ClientError] = []
        for backend in self.backends:
            try:
                backend.admission.check_room(caller)
                return
            except ClientError as error:
                errors.append(error)
        raise errors[0]

    def close(self, reason: str) -> None:
        """Refuse new requests."""
        for backend in self.backends:
            backend.admission.close(reason)

    @property
    def closed_reason(self) -> str:
        return self.default.admission.closed_reason

    @property
    def running_count(self) -> int:
        return sum(backend.admission.running_count for backend in self.backends)

    @property
    def queued_count(self) -> int:
        """Requests that wait for a place, or for their model to be loaded."""
        return sum(backend.admission.queued_count + len(backend.gate.waiting) for backend in self.backends)

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of the models that have been loaded."""
        return list(dict.fromkeys(filter(None, (backend.state.fingerprint for backend in self.backends))))
