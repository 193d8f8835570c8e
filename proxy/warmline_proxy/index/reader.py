"""The index for who looks: one transaction a question, no lock, in any process."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from warmline_common.storage.home import Home
from warmline_proxy.index import lookup as index_walk
from warmline_proxy.index import turns as index_turns
from warmline_proxy.index.gather import ConversationSnapshot, read_conversation
from warmline_proxy.index.recovery import verify as index_verify
from warmline_proxy.store.environment import LmdbEnvironment
from warmline_proxy.store.rows import (
    CheckpointRow,
    FileUsage,
    IndexFinding,
    IndexSnapshot,
    PrefixMatch,
    QuarantineRow,
    RequestRecord,
    SegmentRow,
    SessionRow,
    Totals,
    TurnRow,
)


class IndexReader:
    """Read-only; works whether a proxy is running or not.  Thread-safe; no call waits for a writer.

    Raises NoIndex, WrongSchema or IndexFailure.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._environment = LmdbEnvironment(home.index, writable=False)

    def match_prefix(self, root: bytes, tokens: bytes, limit: int) -> PrefixMatch:
        """The longest stored prefix of packed `tokens`, at most `limit` tokens; milliseconds even at 200k tokens."""
        with self._environment.read_transaction() as tables:
            return index_walk.match_prefix(tables, root, tokens, limit)

    def totals(self) -> Totals:
        with self._environment.read_transaction() as tables:
            return tables.totals(self._environment.bytes_used())

    def snapshot(self) -> IndexSnapshot:
        """Everything but tokens, at one moment."""
        with self._environment.read_transaction() as tables:
            return tables.snapshot()

    def sessions(self) -> list[SessionRow]:
        """All conversations, last used first."""
        with self._environment.read_transaction() as tables:
            return sorted(tables.sessions(), key=lambda row: -row.last_used)

    def session(self, session_id: str) -> SessionRow | None:
        with self._environment.read_transaction() as tables:
            return tables.session(session_id)

    def segments(self) -> list[SegmentRow]:
        with self._environment.read_transaction() as tables:
            return list(tables.segments())

    def segment(self, segment_id: str) -> SegmentRow | None:
        with self._environment.read_transaction() as tables:
            return tables.segment(segment_id)

    def path_tokens(self, segment_id: str) -> bytes:
        """Packed, from the root to this segment's end; b"" where it is not stored."""
        with self._environment.read_transaction() as tables:
            return index_walk.path_tokens(tables, segment_id)

    def tokens_from(self, segment_id: str, at: int, count: int) -> bytes:
        """Packed: at most `count` that are stored from `at` in this segment on, along the youngest branch below it."""
        with self._environment.read_transaction() as tables:
            return index_walk.tokens_from(tables, segment_id, at, count)

    def segment_path(self, segment_id: str) -> list[SegmentRow]:
        """From the root to this segment."""
        with self._environment.read_transaction() as tables:
            return index_walk.segment_path(tables, segment_id)

    def checkpoints(self, segment_id: str = "") -> list[CheckpointRow]:
        """Those of one segment by position, or all."""
        with self._environment.read_transaction() as tables:
            return tables.checkpoints(segment_id)

    def conversation(self, session_id: str) -> ConversationSnapshot | None:
        """All that is stored of one, at one moment; None where that is nothing."""
        with self._environment.read_transaction() as tables:
            return read_conversation(tables, session_id)

    def usage(self, file_id: str) -> FileUsage:
        with self._environment.read_transaction() as tables:
            return tables.usage(file_id)

    def requests(self, count: int = 1000) -> list[RequestRecord]:
        """What happened to the last requests, newest first."""
        with self._environment.read_transaction() as tables:
            return [record for _, record in tables.requests()][: -count - 1 : -1]

    def turns(self, root: bytes, call_ids: Iterable[str]) -> list[TurnRow]:
        """The sampled turns with these calls, each once; those that are not known are left out."""
        with self._environment.read_transaction() as tables:
            rows = (index_turns.find_turn(tables, root, call_id) for call_id in call_ids)
            return list({row.calls[0]: row for row in rows if row is not None}.values())

    def quarantined(self) -> list[QuarantineRow]:
        with self._environment.read_transaction() as tables:
            return tables.quarantined()

    def verify(self, deep: bool = False, progress: Callable[[int], object] = lambda _: None) -> list[IndexFinding]:
        """Every structural invariant, and every file's header, tokens and place; `deep` reads all their bytes.

        `progress` hears each file's bytes once it was looked at.
        """
        listing = index_verify.DiskListing.from_home(self.home)
        with self._environment.read_transaction() as tables:
            findings = index_verify.verify(tables, self.home, listing, deep, progress)
        with self._environment.read_transaction() as tables:
            return index_verify.filter_stored(tables, findings)

    def close(self) -> None:
        self._environment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
