"""Facts of a served model, for the lists of all APIs.  Pure."""

from dataclasses import dataclass

from warmline_common.protocol.messages import BackendStatus


@dataclass(frozen=True)
class ServedModelInfo:
    """A model; `created` is Unix seconds, 0 where nothing is known of it yet, and so is its context's length."""

    name: str = ""
    created: int = 0
    context_tokens_max: int = 0
    is_loaded: bool | None = None  # None: a model that always is


def make_model_info(status: BackendStatus | None) -> ServedModelInfo:
    """Facts by a backend's status."""
    return (
        ServedModelInfo(status.model, status.model_created, status.context_tokens_max) if status else ServedModelInfo()
    )
