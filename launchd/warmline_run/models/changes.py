"""Changes made by a command of `warmline models`, in words for people.  Pure."""

from collections.abc import Iterator

from warmline_common.protocol.keeper import HOLDS_MEMORY, RUNNING, ModelStage
from warmline_run.models.client import ListedModel, ModelList
from warmline_run.models.table import format_memory


def describe_load(before: ListedModel, after: ListedModel) -> str:
    if after.stage != ModelStage.LOADED:
        return f"{after.name} is {after.stage}{_format_reason(after)}"
    if before.stage == ModelStage.LOADED:
        return f"{after.name} was loaded already"
    held = f", and holds {format_memory(after.held_bytes)}" if after.held_bytes else ""
    return f"{after.name} is loaded now{held}" + (f" (in {after.load_s:.1f} s)" if after.load_s else "")


def describe_unload(before: ListedModel, after: ListedModel) -> str:
    if after.stage in HOLDS_MEMORY:
        return f"{after.name} is {after.stage}"
    if before.stage not in HOLDS_MEMORY:
        return f"{after.name} was not loaded"
    held = f"; it held {format_memory(before.held_bytes)}" if before.held_bytes else ""
    return f"{after.name} is unloaded now{held}"


def describe_pin(before: ListedModel, after: ListedModel) -> str:
    if not after.pinned:
        return f"{after.name} is not pinned any more" if before.pinned else f"{after.name} was not pinned"
    if before.pinned:
        return f"{after.name} was pinned already"
    if after.stage == ModelStage.LOADED:
        return f"{after.name} is pinned now, and stays loaded"
    if after.stage in (ModelStage.UNLOADED, ModelStage.FAILED) and after.reason:
        return f"{after.name} is pinned now, but can't be loaded{_format_reason(after)}"
    return f"{after.name} is pinned now, and is loaded next"


def list_unloaded(before: ModelList, after: ModelList, but: str) -> Iterator[str]:
    """Names of the other models that have been unloaded meanwhile."""
    stages = {model.name: model.stage for model in before.models}
    for model in after.models:
        if model.name != but and stages.get(model.name) in RUNNING and model.stage not in RUNNING:
            yield model.name


def _format_reason(model: ListedModel) -> str:
    return f": {model.reason}" if model.reason else ""
