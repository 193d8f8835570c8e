"""Reader of the index: one transaction a question, no lock, in any process."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self, TypeVar

from warmline_common.protocol.tokens import TOKEN_BYTES, namespace
from warmline_common.storage.home import Home
from warmline_proxy.index import lookup
from warmline_proxy.index import turns as sampled_turns
from warmline_proxy.index.responses import list_responses
from warmline_proxy.store import rows
from warmline_proxy.store.environment import LmdbEnvironment
from warmline_proxy.store.tables import Tables

T = TypeVar("T")


@dataclass(frozen=True)
class ConversationSnapshot:
    """A stored conversation.  Its rows in `segments[i]` end at `segment_ends[i]`; further ones belong to others."""

    session: rows.SessionRow
    tokens: bytes  # packed
    segments: list[rows.SegmentRow]
    segment_ends: list[int]
    checkpoints: list[rows.CheckpointRow]  # on its path, by position
    turns: list[rows.TurnRow]  # sampled in it, oldest first

    @property
    def file_ids(self) -> list[str]:
        return [row.id for row in self.segments] + [row.id for row in self.checkpoints]


class IndexReader:
    """Read-only; works whether a proxy is running or not.  Thread-safe; no call waits for a writer.

    Raises IndexStoreError; IndexMissingError, IndexSchemaError where it is opened.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._environment = LmdbEnvironment(home.index, writable=False)

    def read_transaction(self) -> AbstractContextManager[Tables]:
        """Tables at one moment; no lock is taken."""
        return self._environment.read_transaction()

    def require_sound_pages(self) -> None:
        """Check all pages of the index's file.  Raises IndexDamagedError where LMDB could not use it."""
        self._environment.require_sound_pages()

    def _read(self, question: Callable[[Tables], T]) -> T:
        with self._environment.read_transaction() as tables:
            return question(tables)

    def match_prefix(self, root: bytes, tokens: bytes, limit: int) -> rows.PrefixMatch:
        """The longest stored prefix of packed `tokens`, at most `limit` tokens; milliseconds even at 200k tokens."""
        return self._read(lambda tables: lookup.match_prefix(tables, root, tokens, limit))

    def totals(self) -> rows.Totals:
        return self._read(lambda tables: tables.totals(self._environment.bytes_used()))

    def snapshot(self) -> rows.IndexSnapshot:
        """Everything but tokens, at one moment."""
        return self._read(lambda tables: tables.snapshot())

    def sessions(self) -> list[rows.SessionRow]:
        """All conversations, last used first."""
        return self._read(lambda tables: sorted(tables.sessions(), key=lambda row: -row.last_used))

    def session(self, session_id: str) -> rows.SessionRow | None:
        return self._read(lambda tables: tables.session(session_id))

    def segments(self) -> list[rows.SegmentRow]:
        return self._read(lambda tables: list(tables.segments()))

    def segment(self, segment_id: str) -> rows.SegmentRow | None:
        return self._read(lambda tables: tables.segment(segment_id))

    def path_tokens(self, segment_id: str) -> bytes:
        """Packed, from the root to this segment's end; b"" where it is not stored."""
        return self._read(lambda tables: lookup.path_tokens(tables, segment_id))

    def tokens_from(self, segment_id: str, at: int, count: int) -> bytes:
        """Packed: at most `count` that are stored from `at` in this segment on, along the youngest branch below it."""
        return self._read(lambda tables: lookup.tokens_from(tables, segment_id, at, count))

    def conversation(self, session_id: str) -> ConversationSnapshot | None:
        """All that is stored of a conversation, at one moment; None where that is nothing."""
        return self._read(lambda tables: read_conversation(tables, session_id))

    def requests(self, count: int = 1000) -> list[rows.RequestRecord]:
        """Records of the last requests, newest first."""
        return self._read(lambda tables: [record for _, record in tables.requests()][: -count - 1 : -1])

    def turns(self, root: bytes, call_ids: Iterable[str]) -> list[rows.TurnRow]:
        """Sampled turns with these calls, each once; unknown calls are left out."""
        with self._environment.read_transaction() as tables:
            found = (sampled_turns.find_turn(tables, root, call_id) for call_id in call_ids)
            return list({turn.calls[0]: turn for turn in found if turn is not None}.values())

    def responses(self) -> list[rows.ResponseRow]:
        """Stored responses of all owners, oldest first, without their text."""
        return self._read(lambda tables: [row for _, row in list_responses(tables)])

    def response_fingerprints(self) -> dict[bytes, str]:
        """Fingerprints of the stored responses' roots: of their KV, and of their owners, who may share the cache."""
        found = self.responses()
        owners = {(row.fingerprint, row.owner) for row in found}
        own = {namespace(fingerprint, owner): fingerprint for fingerprint, owner in owners}
        return own | {row.root: row.fingerprint for row in found}

    def quarantined(self) -> list[rows.QuarantineRow]:
        return self._read(lambda tables: tables.quarantined())

    def close(self) -> None:
        self._environment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_conversation(tables: Tables, session_id: str) -> ConversationSnapshot | None:
    """Snapshot of a conversation; None where nothing is stored under this id."""
    session = tables.session(session_id)
    segments = lookup.segment_path(tables, session.leaf) if session else []
    if session is None or not segments:
        return None
    ends = [row.start for row in segments[1:]] + [session.tokens]
    spans = zip(segments, ends, strict=True)
    return ConversationSnapshot(
        session=session,
        tokens=lookup.path_tokens(tables, session.leaf)[: session.tokens * TOKEN_BYTES],
        segments=segments,
        segment_ends=ends,
        checkpoints=[state for row, end in spans for state in tables.checkpoints(row.id) if state.position <= end],
        turns=[turn for _, turn in sampled_turns.list_turns(tables) if turn.session == session_id],
    )
