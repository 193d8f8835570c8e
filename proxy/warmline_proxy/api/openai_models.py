"""What is served, as OpenAI's clients ask for it (pure).  Any name is served, so any name has an entry."""

from typing import Any

from warmline_common.protocol.messages import BackendStatus

MODELS_PATH = "/v1/models"


def is_models_path(path: str) -> bool:
    return path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")


def build_models_reply(path: str, status: BackendStatus) -> dict[str, Any]:
    """The list of one, or the entry of the model that the path names, slashes and all."""
    if name := path.removeprefix(MODELS_PATH).strip("/"):
        return _model_entry(name, status)
    return {"object": "list", "data": [_model_entry(status.model, status)]}


def _model_entry(name: str, status: BackendStatus) -> dict[str, Any]:
    """`root` is what answers under this name; `max_model_len`, as vLLM has it, is left out where there is no limit."""
    limit = {"max_model_len": status.context_tokens_max} if status.context_tokens_max else {}
    about = {"object": "model", "created": status.model_created, "owned_by": "warmline", "root": status.model}
    return {"id": name, **about, **limit}
