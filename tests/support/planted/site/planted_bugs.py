"""Bugs of caches, each switched on while the file `bug` in the control folder names it.

The oracle must see them: none raises, is slow, or looks wrong by itself.  Checks of the product that would catch a bug
before an answer shows it are switched off with it.
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

BUGS_OF_RESTORES = (SHORT_SEGMENT, STALE_CHECKPOINT, SKIPPED_LAYER, WRONG_PARENT)

Active = Callable[..., bool]  # says whether one of these bugs is switched on


def active_in(folder: Path) -> Active:
    def active(*bugs: str) -> bool:
        try:
            return (folder / "bug").read_text() in bugs
        except FileNotFoundError:
            return False

    return active


def replace_while_active(owner: Any, name: str, bug: Callable[..., Any], active: Active, *bugs: str) -> None:
    """Call `bug` with the real function as its first argument while one of the bugs is on."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return bug(real, *arguments, **options) if active(*bugs) else real(*arguments, **options)

    setattr(owner, name, wrapped)


def plant_in_backend(active: Active) -> None:
    from warmline_backend.kv_cache import segment_io as segments
    from warmline_backend.kv_cache.kv import KV
    from warmline_backend.scheduler.decoding.decode_group import DecodeGroup
    from warmline_backend.scheduler.decoding.merging import GroupMerger
    from warmline_backend.scheduler.finish import Finisher

    replace_while_active(KV, "slice_rows", repeat_row_before_last, active, SHORT_SEGMENT)
    replace_while_active(KV, "capture_checkpoint", capture_first_checkpoint_again, active, STALE_CHECKPOINT)
    replace_while_active(segments.TensorReader, "read_rows", skip_first_layer, active, SKIPPED_LAYER)
    replace_while_active(segments.ChainLoader, "load", load_other_parent, active, WRONG_PARENT)
    replace_while_active(segments.ChainLoader, "_check_tokens", skip_check, active, WRONG_PARENT)
    replace_while_active(segments, "_check_prefix", skip_check, active, WRONG_PARENT)
    replace_while_active(DecodeGroup, "dissolve", leave_caches, active, KEPT_AFTER_EXCEPTION)
    replace_while_active(Finisher, "discard", keep_after_failure, active, KEPT_AFTER_EXCEPTION)
    replace_while_active(GroupMerger, "find_host", find_host_in_exact_mode, active, BATCH_OF_TWO)
    replace_while_active(KV, "floor_to_grid", lambda real, self, position: position, active, OFF_GRID, DECODED)
    end = KV.savable_length.fget
    KV.savable_length = property(lambda self: self.length if active(DECODED) else end(self))  # type: ignore[assignment,method-assign,misc]


def plant_in_proxy(active: Active) -> None:
    from warmline_proxy import planner
    from warmline_proxy.pipeline import generator
    from warmline_proxy.request import registry

    for module in (planner, generator, registry):
        replace_while_active(module, "align_to_grid", lambda real, position, grid: position, active, OFF_GRID, DECODED)
    # Computing a tiny model's prompt may be sooner, and would show no bug.
    replace_while_active(planner, "choose_restore_position", restore_all, active, *BUGS_OF_RESTORES)
    replace_while_active(planner, "is_worth_computing", lambda real, *costs: False, active, *BUGS_OF_RESTORES)


def restore_all(real: Any, cuts: Any, *arguments: Any) -> int:
    """Choose the last place, however long a restore takes."""
    return int(cuts[-1])


def skip_check(real: Any, *arguments: Any) -> None:
    """Check nothing."""


def repeat_row_before_last(real: Any, self: Any, *span: Any) -> Any:
    """Put the row before the last one in the place of the last."""
    import mlx.core as mx

    return {
        name: mx.contiguous(mx.concatenate([array[:, :, :-1], array[:, :, -2:-1]], axis=2))
        for name, array in real(self, *span).items()
    }


def capture_first_checkpoint_again(real: Any, self: Any) -> None:
    """Capture the first checkpoint's state for all later positions."""
    first = min(self.checkpoints, default=0)
    if first:
        self.checkpoints[self.length] = self.checkpoints[first]
    else:
        real(self)


def skip_first_layer(real: Any, self: Any, name: str, target: Any, upto: int) -> None:
    """Have zeros for the rows of layer 0: memory that is left alone may hold the right ones by chance."""
    if name.startswith("0."):
        target.data[:] = bytes(len(target.data))
    else:
        real(self, name, target, upto)


def load_other_parent(real: Any, self: Any, tokens: bytes, chain: list[Any], *rest: Any, **options: Any) -> Any:
    """Load segments of another conversation with the same positions."""
    return real(self, tokens, [find_other_segment(self, link) for link in chain], *rest, **options)


def find_other_segment(loader: Any, link: Any) -> Any:
    """Find another segment with the same start that is long enough; the link itself where there is none."""
    from warmline_common.protocol.messages import SegmentRef
    from warmline_common.storage.segment_file import read_header

    for path in sorted(loader.segment_file(link.id).parent.parent.glob("*/*")):
        meta = read_header(path).meta
        if (meta.kind, meta.start) == ("segment", link.start) and meta.end >= link.upto and meta.id != link.id:
            return SegmentRef(id=meta.id, start=meta.start, end=meta.end, upto=link.upto)
    return link


def leave_caches(real: Any, self: Any) -> Any:
    """Keep the caches that a failed step has left: the first layer's keys were not computed."""
    first = self.batch.prompt_cache[0]
    first.keys = first.keys * 0
    for sequence in self.sequences:
        sequence.kv.layers = list(self.batch.prompt_cache)
    return real(self)


def keep_after_failure(real: Any, self: Any, sequences: Any, error: Exception) -> None:
    from warmline_backend.scheduler.finish import Ending

    self.is_device_suspect = True
    for sequence in sequences:
        self._notify_end(sequence, self._add_resident(sequence), Ending("discarded", f"the engine failed: {error}"))


def find_host_in_exact_mode(real: Any, self: Any, newcomer: Any) -> Any:
    hosts = (host for host in self._queues.groups if host is not newcomer)
    return next((host for host in hosts if host.can_accept(newcomer.sequences)), None)
