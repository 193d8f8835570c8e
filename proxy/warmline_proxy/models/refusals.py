"""Refusals of requests whose model is not loaded, and reasons of waits, in words.  Pure."""

from collections.abc import Sequence

from warmline_common.protocol.keeper import ModelsReply, ModelStage, ModelStatus
from warmline_common.settings.models import ModelConfig
from warmline_proxy.errors import ClientError, bad_request, service_unavailable
from warmline_proxy.models.swaps import SwapDecision

NOT_LOADED_RETRY_S = 10  # until the other model may be idle
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's and Anthropic's SDKs would wait twice before they show the message


def describe_wait(name: str, decision: SwapDecision, stay_s: float) -> str:
    """Reason why requests wait for a model that is not being loaded; "" where it is."""
    if name != decision.target and decision.target:
        return f"{decision.target}, whose requests have waited longer, is loaded first"
    if name != decision.target:
        others = [each for each in decision.starting if each != name]
        return f"{' and '.join(others)}, which is being loaded, has the memory" if others else ""
    if decision.staying:
        names = " and ".join(decision.staying)
        return f"{names} must have been loaded for {stay_s:g} s before it is unloaded (model_stay_s)"
    if decision.victims:
        return f"{' and '.join(decision.victims)} is unloaded for it, once its requests have ended"
    return ""


def build_swap_refusal(default: ModelStatus, models: Sequence[ModelConfig]) -> ClientError:
    """503 for a request that names no configured model, while the default one has no memory."""
    lacks = "has too little memory for it" if default.stage is ModelStage.LOADED else "is not loaded"
    names = ", ".join(name for model in models for name in (model.name, *model.aliases))
    message = (
        f"The request names none of the models here, and the default one, {default.name!r}, {lacks}, and other models "
        f"are unloaded only for a configured name. Send one of these as `model`: {names}."
    )
    return service_unavailable(message, "model_not_loaded", NOT_LOADED_RETRY_S, NO_RETRY)


def build_down_error(name: str, reason: str, limit_s: float) -> ClientError:
    """503 for a wait for a model that has been unable to start for longer than the limit."""
    message = (
        f"The model can't be served now: {name!r} is not loaded: {reason} (waited {limit_s:g} s).  Try again soon."
    )
    return service_unavailable(message)


def build_failed_error(status: ModelStatus) -> ClientError:
    """503 for a model that could not be loaded."""
    return service_unavailable(
        f"The model {status.name!r} can't be served: {status.reason or 'see its log'}.", "model_failed"
    )


def build_too_large_error(
    status: ModelStatus, reply: ModelsReply, missing_bytes: int, extra_bytes: int = 0
) -> ClientError:
    """400 for a model that can never be loaded as configured; `extra_bytes` are the request's, beyond the least."""
    pinned = [each.name for each in reply.models if each.pinned and each.name != status.name]
    beside = f" beside the pinned {', '.join(pinned)}" if pinned else ""
    remedy = "unpin one, raise models_memory_gb" if pinned else "raise models_memory_gb"
    context = "the context of this request" if extra_bytes else "a context of 8,192 tokens"
    return bad_request(
        f"The model {status.name!r} can't be loaded: it needs {(status.need_bytes + extra_bytes) / 1e9:.3f} GB "
        f"({status.weight_bytes / 1e9:.3f} GB of weights, a prefill step and {context}), and of the "
        f"{reply.memory_bytes / 1e9:.3f} GB for all models {missing_bytes / 1e9:.3f} GB are missing{beside}; {remedy}, "
        + ("or send a shorter prompt." if extra_bytes else "or serve a smaller model."),
        code="model_too_large",
    )
