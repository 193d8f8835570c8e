"""Waits of a request, in words.  Pure."""

from collections.abc import Mapping

import msgspec

from warmline_common.protocol import waits
from warmline_common.protocol.waits import list_long_waits

# By reason; docs/explain.md has the same table.
WAITS = {
    waits.BODY: "its body, which the client was sending",
    waits.LOAD: "its model to be loaded, for memory of another model, or until that had been loaded for model_stay_s",
    waits.BACKEND: "the backend, which was starting or loading the model",
    waits.PROMPT: "its prompt to be rendered and tokenized",
    waits.RELEASE: "the end of an earlier request with the same beginning, or of those of a proxy that died",
    waits.PLACE: "a place among the running requests",
    waits.SAVE: "a save of another request, which gives a warmer start or frees memory",
    waits.STEP: "the end of the step that the engine was in: of another request, or of a save",
    waits.AUDIT: "the end of an audit's step",
    waits.MEMORY: "memory that other requests held",
    waits.LEADER: "another request's prefill of the same beginning",
    waits.TURNS: "the chunks and decode steps of other requests, before or between its own",
}


class WaitReport(msgspec.Struct, kw_only=True):
    """Reason of a wait, and how long it was."""

    reason: str  # a name in WAITS
    seconds: float
    means: str


def report_waits(seconds_by_reason: Mapping[str, float]) -> list[WaitReport]:
    """Waits that matter, the longest first."""
    return [
        WaitReport(reason=reason, seconds=seconds, means=WAITS.get(reason, reason))
        for reason, seconds in list_long_waits(seconds_by_reason)
    ]
