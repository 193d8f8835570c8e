"""The index for who looks: one transaction a question, no lock, in any process."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_common.storage.home import Home
from warmline_proxy.index import lookup
from warmline_proxy.index import turns as sampled_turns
from warmline_proxy.store.environment import LmdbEnvironment
from warmline_proxy.store.rows import (
    CheckpointRow,
    FileUsage,
    IndexSnapshot,
    PrefixMatch,
    QuarantineRow,
    RequestRecord,
    SegmentRow,
    SessionRow,
    Totals,
    TurnRow,
)
from warmline_proxy.store.tables import Tables


@dataclass(frozen=True)
class ConversationSnapshot:
    """`segments[i]` has its rows up to `ends[i]`, where the next one leaves it; what else it holds is of others."""

    session: SessionRow
    tokens: bytes  # packed
    segments: list[SegmentRow]
    segment_ends: list[int]
    checkpoints: list[CheckpointRow]  # on its path, by position
    turns: list[TurnRow]  # that were sampled in it, oldest first

    @property
    def file_ids(self) -> list[str]:
        return [row.id for row in self.segments] + [row.id for row in self.checkpoints]


class IndexReader:
    """Read-only; works whether a proxy is running or not.  Thread-safe; no call waits for a writer.

    Raises NoIndex, WrongSchema or IndexFailure.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._environment = LmdbEnvironment(home.index, writable=False)

    def read_transaction(self) -> AbstractContextManager[Tables]:
        """Tables at one moment; no lock is taken."""
        return self._environment.read_transaction()

    def match_prefix(self, root: bytes, tokens: bytes, limit: int) -> PrefixMatch:
        """The longest stored prefix of packed `tokens`, at most `limit` tokens; milliseconds even at 200k tokens."""
        with self._environment.read_transaction() as tables:
            return lookup.match_prefix(tables, root, tokens, limit)

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
            return lookup.path_tokens(tables, segment_id)

    def tokens_from(self, segment_id: str, at: int, count: int) -> bytes:
        """Packed: at most `count` that are stored from `at` in this segment on, along the youngest branch below it."""
        with self._environment.read_transaction() as tables:
            return lookup.tokens_from(tables, segment_id, at, count)

    def segment_path(self, segment_id: str) -> list[SegmentRow]:
        """From the root to this segment."""
        with self._environment.read_transaction() as tables:
            return lookup.segment_path(tables, segment_id)

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
        """Records of the last requests, newest first."""
        with self._environment.read_transaction() as tables:
            return [record for _, record in tables.requests()][: -count - 1 : -1]

    def turns(self, root: bytes, call_ids: Iterable[str]) -> list[TurnRow]:
        """The sampled turns with these calls, each once; those that are not known are left out."""
        with self._environment.read_transaction() as tables:
            rows = (sampled_turns.find_turn(tables, root, call_id) for call_id in call_ids)
            return list({row.calls[0]: row for row in rows if row is not None}.values())

    def quarantined(self) -> list[QuarantineRow]:
        with self._environment.read_transaction() as tables:
            return tables.quarantined()

    def close(self) -> None:
        self._environment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_conversation(tables: Tables, session_id: str) -> ConversationSnapshot | None:
    """None where nothing is stored under this id."""
    session = tables.session(session_id)
    rows = lookup.segment_path(tables, session.leaf) if session else []
    if session is None or not rows:
        return None
    ends = [row.start for row in rows[1:]] + [session.tokens]
    states = [
        state
        for row, end in zip(rows, ends, strict=True)
        for state in tables.checkpoints(row.id)
        if state.position <= end
    ]
    return ConversationSnapshot(
        session=session,
        tokens=lookup.path_tokens(tables, session.leaf)[: session.tokens * TOKEN_BYTES],
        segments=rows,
        segment_ends=ends,
        checkpoints=states,
        turns=[turn for _, turn in sampled_turns.list_turns(tables) if turn.session == session_id],
    )
