"""Messages between the proxy and the keeper, which owns one backend process a loaded model.  Loopback, JSON, HTTP.

    GET  /keeper/models?version=N&wait_s=S      ModelsReply, once its version is another than N, or after S seconds
    POST /keeper/models/NAME/load               LoadRequest -> ModelsReply; 409 no_room, 400 model_too_large
    POST /keeper/models/NAME/prepare            LoadRequest -> ModelsReply: the load follows once there is memory
    POST /keeper/models/NAME/unload             ModelsReply; 409 model_pinned
    POST /keeper/models/NAME/pin                PinModelRequest -> ModelsReply; 503 pin_not_written
    GET  /health                                without a secret: {"keeper": true, "pid": ...}

All others bear the home's secret.  Errors have OpenAI's error object.
"""

from enum import StrEnum

import msgspec

CONTEXT_TOKENS_MIN = 8192  # of a conversation that a loaded model has memory for, whatever else is loaded
POLL_WAIT_S_MAX = 30.0


class ModelStage(StrEnum):
    """Stages of a model's backend process."""

    UNLOADED = "unloaded"
    STARTING = "starting"  # the process is started, loads weights, or is started again
    LOADED = "loaded"
    STOPPING = "stopping"
    FAILED = "failed"  # its configuration or its files are at fault: see `reason`


RUNNING = (ModelStage.STARTING, ModelStage.LOADED)
HOLDS_MEMORY = (ModelStage.STARTING, ModelStage.LOADED, ModelStage.STOPPING)


class ModelStatus(msgspec.Struct, kw_only=True):
    """One configured model.  Bytes are 0 while they are unknown."""

    name: str
    instance: str
    stage: ModelStage
    pinned: bool
    port: int = 0  # of its backend, from LOADED until its process is gone, also while it stops; else 0
    pid: int = 0  # of its backend; 0 where there is none
    weight_bytes: int = 0
    need_bytes: int = 0  # weights, a prefill step, and the KV of CONTEXT_TOKENS_MIN tokens
    kv_min_bytes: int = 0  # the last of these
    held_bytes: int = 0  # of its process: weights, a prefill step and the present budget; 0 where there is none
    kv_bytes: int = 0  # present budget for KV
    starts: int = 0  # of its process, since the keeper's start
    down_s: float = 0.0  # for how long a process that is to run has not answered
    load_s: float = 0.0  # from the last start of its process until it was loaded
    reason: str = ""  # why it has failed, or is started again


class ModelsReply(msgspec.Struct, kw_only=True):
    """All configured models in their order; the first is the default."""

    boot: str  # of the keeper
    version: int  # grows with each change
    memory_bytes: int  # for all loaded models together
    models: list[ModelStatus]
    ready: bool = True  # False while processes of an earlier keeper still end


class LoadRequest(msgspec.Struct, kw_only=True):
    """Load a model, or give a loaded one more memory for KV: `kv_bytes` at least, 0 for CONTEXT_TOKENS_MIN tokens.

    It keeps so much until the next load of the same model says otherwise.
    """

    kv_bytes: int = 0


class PinModelRequest(msgspec.Struct, kw_only=True):
    pinned: bool = True
