"""What the index knows of one conversation, read in one transaction."""

from dataclasses import dataclass

from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.index.lookup import path_tokens, segment_path
from warmline_proxy.index.turns import list_turns
from warmline_proxy.store.rows import CheckpointRow, SegmentRow, SessionRow, TurnRow
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


def read_conversation(tables: Tables, session_id: str) -> ConversationSnapshot | None:
    """None where nothing is stored under this id."""
    session = tables.session(session_id)
    rows = segment_path(tables, session.leaf) if session else []
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
        tokens=path_tokens(tables, session.leaf)[: session.tokens * TOKEN_BYTES],
        segments=rows,
        segment_ends=ends,
        checkpoints=states,
        turns=[turn for _, turn in list_turns(tables) if turn.session == session_id],
    )
