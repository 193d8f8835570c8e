"""Reasons why a request waits: names of `Timings.waits`, `RestoreReply.waits` and `RequestRecord.waits`, in seconds."""

from collections.abc import Mapping

# Before the engine begins to work on a request, in the proxy ...
BODY = "body"  # of its client, to be received
LOAD = "load"  # of its model, and before that, of another model's requests whose memory it needs
BACKEND = "backend"  # to start, and to load the only model
PROMPT = "prompt"  # to be rendered and tokenized
RELEASE = "release"  # of an earlier request with the same beginning, or of those of a proxy that died
PLACE = "place"  # among the running requests
SAVE = "save"  # of another request, which gives a warmer start or frees memory
# ... and in the backend: also PLACE and SAVE.
STEP = "step"  # the engine's present one, for others or for a save
AUDIT = "audit"  # a layer of its prefill, which the engine was computing
MEMORY = "memory"  # held by other requests
LEADER = "leader"  # another request's prefill of the same beginning
# Afterwards, in its prefill.
TURNS = "turns"  # of other requests, before or between its own chunks

LONG_WAIT_S_MIN = 0.05


def add_waits(waits: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Both, by reason."""
    return {reason: waits.get(reason, 0.0) + others.get(reason, 0.0) for reason in {**waits, **others}}


def sum_waits(waits: Mapping[str, float]) -> float:
    """Seconds before the engine began to work on a request."""
    return sum(seconds for reason, seconds in waits.items() if reason != TURNS)


def list_long_waits(waits: Mapping[str, float]) -> list[tuple[str, float]]:
    """Waits that matter, the longest first."""
    return sorted(((name, s) for name, s in waits.items() if s >= LONG_WAIT_S_MIN), key=lambda wait: -wait[1])
