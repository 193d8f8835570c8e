"""What is served, as Anthropic lists models.  Pure."""

from datetime import UTC, datetime
from typing import Any

from warmline_common.protocol.messages import BackendStatus


def model_list(status: BackendStatus) -> dict[str, Any]:
    model = model_info(status, status.model)
    return {"data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}


def model_info(status: BackendStatus, name: str) -> dict[str, Any]:
    """The one model that is served, under any name."""
    return {
        "type": "model",
        "id": name,
        "display_name": status.model,
        "created_at": datetime.fromtimestamp(status.model_created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": status.context_tokens_max or None,
        "max_tokens": status.context_tokens_max or None,
    }
