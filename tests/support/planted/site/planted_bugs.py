"""Bugs that a cache may have, each switched on while the file `bug` in the control folder names it.

They are what the oracle must be able to see: nothing here fails, computes slowly, or looks wrong.  Where a check of the
product would catch one before an answer shows it, that check is switched off with it.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

# In the backend:
SHORT_SEGMENT = "off by one in the stored length"
STALE_CHECKPOINT = "a stale checkpoint"
SKIPPED_LAYER = "a skipped layer"
WRONG_PARENT = "a wrong parent"
KEPT_AFTER_EXCEPTION = "a cache extracted after an exception"
BATCH_OF_TWO = "a batch of two in exact mode"
# In both processes:
OFF_GRID = "off-grid reuse in exact mode"
DECODED = "reuse of decoded KV in exact mode"

Active = Callable[..., bool]  # whether one of these bugs is switched on


def active_in(folder: Path) -> Active:
    def active(*bugs: str) -> bool:
        try:
            return (folder / "bug").read_text() in bugs
        except FileNotFoundError:
            return False

    return active


def instead(owner: Any, name: str, bug: Callable[..., Any], active: Active, *bugs: str) -> None:
    """Call `bug` with the real thing before its arguments while one of the bugs is on."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return bug(real, *arguments, **options) if active(*bugs) else real(*arguments, **options)

    setattr(owner, name, wrapped)


def plant_in_backend(active: Active) -> None:
    from warmline_backend.kv_cache import segment_io as segments
    from warmline_backend.kv_cache.kv import KV
    from warmline_backend.scheduler.decode_group import DecodeGroup
    from warmline_backend.scheduler.finish import Finisher
    from warmline_backend.scheduler.scheduler import Scheduler

    instead(KV, "slice_rows", rows_but_the_last, active, SHORT_SEGMENT)
    instead(KV, "capture_checkpoint", capture_the_first_again, active, STALE_CHECKPOINT)
    instead(segments._TensorReader, "read_rows", read_all_layers_but_one, active, SKIPPED_LAYER)
    instead(segments.ChainLoader, "load", load_from_another, active, WRONG_PARENT)
    instead(segments.ChainLoader, "_check_tokens", unchecked, active, WRONG_PARENT)
    instead(segments, "_check_prefix", unchecked, active, WRONG_PARENT)
    instead(DecodeGroup, "dissolve", leave_caches, active, KEPT_AFTER_EXCEPTION)
    instead(Finisher, "discard", keep_all_the_same, active, KEPT_AFTER_EXCEPTION)
    instead(Scheduler, "_can_merge", join_in_exact_mode, active, BATCH_OF_TWO)
    instead(KV, "floor_to_grid", lambda real, self, position: position, active, OFF_GRID, DECODED)
    end = KV.savable_length.fget
    KV.savable_length = property(lambda self: self.length if active(DECODED) else end(self))  # type: ignore[assignment,method-assign,misc]


def plant_in_proxy(active: Active) -> None:
    from warmline_proxy import planner as plan
    from warmline_proxy.pipeline import generator
    from warmline_proxy.request import registry

    for module in (plan, generator, registry):
        instead(module, "align_to_grid", lambda real, position, grid: position, active, OFF_GRID, DECODED)


def unchecked(real: Any, *arguments: Any) -> None:
    """Whatever it is."""


def rows_but_the_last(real: Any, self: Any, start: int, end: int) -> Any:
    """The last token's row is not there yet, so the one before it stands in its place."""
    import mlx.core as mx

    return {
        name: mx.contiguous(mx.concatenate([array[:, :, :-1], array[:, :, -2:-1]], axis=2))
        for name, array in real(self, start, end).items()
    }


def capture_the_first_again(real: Any, self: Any) -> None:
    """The state of the first position that was kept stands for all that follow."""
    first = min(self.checkpoints, default=0)
    if first:
        self.checkpoints[self.length] = self.checkpoints[first]
    else:
        real(self)


def read_all_layers_but_one(real: Any, self: Any, name: str, target: Any, upto: int) -> None:
    """What is not read stays 0."""
    if not name.startswith("0."):
        real(self, name, target, upto)


def load_from_another(real: Any, self: Any, tokens: bytes, chain: list[Any], *rest: Any, **options: Any) -> Any:
    """One link of the chain is another conversation's, of the same place."""
    return real(self, tokens, [another(self, link) for link in chain], *rest, **options)


def another(loader: Any, link: Any) -> Any:
    """A segment that begins where this one does and reaches as far; the link itself where there is none."""
    from warmline_common.protocol.messages import SegmentRef
    from warmline_common.storage.segment_file import read_header

    for path in sorted(loader.segment_file(link.id).parent.parent.glob("*/*")):
        meta = read_header(path).meta
        if (meta.kind, meta.start) == ("segment", link.start) and meta.end >= link.upto and meta.id != link.id:
            return SegmentRef(id=meta.id, start=meta.start, end=meta.end, upto=link.upto)
    return link


def leave_caches(real: Any, self: Any) -> Any:
    """Whoever was alone in its batch keeps what the failed step has left."""
    for sequence in self.sequences:
        sequence.kv.layers = list(self.batch.prompt_cache)
    return real(self)


def keep_all_the_same(real: Any, self: Any, sequences: Any, error: Exception) -> None:
    self.is_device_suspect = True
    for sequence in sequences:
        self._notify_end(sequence, "discarded", self._add_resident(sequence), f"the engine failed: {error}")


def join_in_exact_mode(real: Any, self: Any, host: Any, newcomer: Any) -> bool:
    return host is not newcomer and bool(host.can_accept(newcomer.sequences[0]))
