"""The index of what is stored: `IndexReader` for who looks, `Index` for the proxy, which owns it."""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from warmline_wire.home import Home
from warmline_wire.messages import Layout, SaveReply

from warmline_proxy.rows import (
    CheckpointRow,
    Finding,
    Match,
    QuarantineRow,
    RequestRecord,
    SaveCommitted,
    SavePlan,
    SegmentRow,
    SessionRow,
    SessionUpdate,
    Totals,
    Usage,
)


class IndexFailure(Exception):
    """The index can't be opened or written: version, map full, no room."""


class NoRoom(IndexFailure):
    """The disk budget can't hold a save, whatever is evicted."""


class IndexReader:
    """Read-only; works whether a proxy is running or not.  Thread-safe; no call waits for a writer."""

    def __init__(self, home: Home) -> None:
        raise NotImplementedError

    def match(self, root: bytes, tokens: bytes, limit: int) -> Match:
        """The longest stored prefix of packed `tokens`, at most `limit` tokens; milliseconds even at 200k tokens."""
        raise NotImplementedError

    def totals(self) -> Totals:
        raise NotImplementedError

    def sessions(self) -> list[SessionRow]:
        """All conversations, last used first."""
        raise NotImplementedError

    def session(self, session_id: str) -> SessionRow | None:
        raise NotImplementedError

    def segments(self) -> list[SegmentRow]:
        raise NotImplementedError

    def segment(self, segment_id: str) -> SegmentRow | None:
        raise NotImplementedError

    def path(self, segment_id: str) -> list[SegmentRow]:
        """From the root to this segment."""
        raise NotImplementedError

    def checkpoints(self, segment_id: str = "") -> list[CheckpointRow]:
        """Those of one segment, or all."""
        raise NotImplementedError

    def usage(self, file_id: str) -> Usage:
        raise NotImplementedError

    def requests(self, count: int = 1000) -> list[RequestRecord]:
        """What happened to the last requests, newest first."""
        raise NotImplementedError

    def quarantined(self) -> list[QuarantineRow]:
        raise NotImplementedError

    def verify(self, deep: bool = False) -> list[Finding]:
        """Every structural invariant and every file's frame and tokens; `deep` reads all their bytes."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Index(IndexReader):
    """The proxy's, under `home.lock`.  Methods may be called on any thread; those that write block until it is durable
    (call them through `asyncio.to_thread`), but `note_use`, `record`, `lease` and `release` return at once.
    """

    def __init__(self, home: Home, budget_bytes: int) -> None:
        raise NotImplementedError

    def begin_save(
        self,
        root: bytes,
        model: str,
        tokens: bytes,
        *,
        checkpoints: Sequence[int],
        layout: Layout,
        may_replace: bool = True,
    ) -> SavePlan | None:
        """What of `tokens` (all of them with rows in memory) is to be written; None where all is stored.

        `checkpoints`: positions whose state is in memory.  `may_replace`: the backend still has the rows of a small
        parent, so that the first segment may swallow it.  Evicts what the budget needs, and deletes those files, before it
        returns; what the plan builds on stays.  Raises NoRoom, or IndexFailure where the index itself is full.
        """
        raise NotImplementedError

    def commit_save(
        self, plan: SavePlan, reply: SaveReply, *, prefill_s: float, session: SessionUpdate
    ) -> SaveCommitted:
        """Make what the backend has written part of the tree, all in one transaction, and advance (or open) its session.

        `prefill_s`: what computing [plan.matched, end) cost.  What no longer fits (its parent is gone, another save was
        sooner) is dropped and its file deleted.
        """
        raise NotImplementedError

    def abort_save(self, plan: SavePlan) -> None:
        """Forget it, and delete what it may have written."""
        raise NotImplementedError

    def note_session(self, root: bytes, tokens: bytes, session: SessionUpdate) -> str:
        """A conversation went on without anything to save: its session's id; "" where nothing of it is stored."""
        raise NotImplementedError

    def note_use(self, ids: Iterable[str]) -> None:
        """Segments and checkpoints that a request reused; written within a second."""
        raise NotImplementedError

    def record(self, record: RequestRecord) -> None:
        """Keep it among the last 1,000; written within a second."""
        raise NotImplementedError

    def lease(self, ids: Iterable[str]) -> None:
        """Keep these files while a restore reads them; counted, so each lease wants its release."""
        raise NotImplementedError

    def release(self, ids: Iterable[str]) -> None:
        raise NotImplementedError

    def make_room(self, bytes_needed: int = 0) -> list[str]:
        """Evict (and delete) until the budget holds with that much more; `begin_save` does it by itself.  Raises NoRoom."""
        raise NotImplementedError

    def quarantine(self, file_id: str, reason: str) -> list[str]:
        """Take a damaged, foreign or suspect file out of the tree, a segment with all that builds on it; their ids."""
        raise NotImplementedError

    def sweep(self) -> int:
        """Delete the files whose rows are gone, but for leased ones; how many.  The other methods do this by themselves."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write the bookkeeping now."""
        raise NotImplementedError

    def compact(self) -> None:
        """Rewrite the index file, so that nothing deleted is left in it.  Readers wait for it."""
        raise NotImplementedError
