"""Two stored conversations side by side: how far they are the same, and where they part.  Reads the index."""

import msgspec

from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens, unpack_tokens
from warmline_proxy.explain.explain import DiffSide, DivergencePoint
from warmline_proxy.explain.text_diff import diff_texts
from warmline_proxy.index.index import IndexReader
from warmline_proxy.store.rows import DIVERGENCE_TOKENS_AFTER, DIVERGENCE_TOKENS_BEFORE, RequestRecord


class StoredConversation(msgspec.Struct, kw_only=True, frozen=True):
    """A conversation, or what a segment's path holds."""

    kind: str  # "session" or "segment"
    id: str
    leaf: str  # the segment that it ends in
    root: bytes
    model: str
    tokens: bytes = b""


class Comparison(msgspec.Struct, kw_only=True):
    """What `cachectl diff --json` prints."""

    a: str
    b: str
    tokens_a: int
    tokens_b: int
    common: int  # tokens that both begin with
    same_root: bool  # one model and one key: else neither is ever reused for the other
    where: DivergencePoint | None = None  # None where one of them ends there
    side_a: DiffSide | None = None  # what stands there
    side_b: DiffSide | None = None
    why_no_text: str = ""


def load_conversation(reader: IndexReader, kind: str, row_id: str) -> StoredConversation | None:
    """None where it is no longer there.  Raises IndexFailure."""
    if kind == "session":
        session = reader.session(row_id)
        if session is None:
            return None
        tokens = reader.path_tokens(session.leaf)[: session.tokens * TOKEN_BYTES]
        return StoredConversation(
            kind=kind, id=row_id, leaf=session.leaf, root=session.root, model=session.model, tokens=tokens
        )
    row = reader.segment(row_id)
    if row is None:
        return None
    tokens = reader.path_tokens(row_id)
    return StoredConversation(kind=kind, id=row_id, leaf=row_id, root=row.root, model=row.model, tokens=tokens)


def compare_conversations(a: StoredConversation, b: StoredConversation, records: list[RequestRecord]) -> Comparison:
    """Without texts.  A request that came by where they part knows its message.  Pure."""
    at = count_common_tokens(a.tokens, b.tokens)
    found = Comparison(
        a=a.id,
        b=b.id,
        tokens_a=len(a.tokens) // TOKEN_BYTES,
        tokens_b=len(b.tokens) // TOKEN_BYTES,
        common=at,
        same_root=a.root == b.root,
    )
    if at < min(found.tokens_a, found.tokens_b):
        found.where = _find_point(at, {a.id, b.id}, records)
        found.side_a, found.side_b = (
            DiffSide(tokens=unpack_tokens(window), text="", differs=[]) for window in cut_windows(a, b, at)
        )
    return found


def cut_windows(a: StoredConversation, b: StoredConversation, at: int) -> tuple[bytes, bytes]:
    """Packed: what stands around that token."""
    begins, ends = max(0, at - DIVERGENCE_TOKENS_BEFORE) * TOKEN_BYTES, (at + DIVERGENCE_TOKENS_AFTER) * TOKEN_BYTES
    return a.tokens[begins:ends], b.tokens[begins:ends]


def add_texts(found: Comparison, text_a: str, text_b: str) -> Comparison:
    """Where there are sides."""
    assert found.side_a is not None and found.side_b is not None
    ranges_a, ranges_b = diff_texts(text_a, text_b)
    return msgspec.structs.replace(
        found,
        side_a=msgspec.structs.replace(found.side_a, text=text_a, differs=ranges_a),
        side_b=msgspec.structs.replace(found.side_b, text=text_b, differs=ranges_b),
    )


def _find_point(at: int, sessions: set[str], records: list[RequestRecord]) -> DivergencePoint:
    divergences = (each.parting for each in records if each.parting and each.session in sessions)
    divergence = next((each for each in divergences if each.at == at), None)
    return DivergencePoint(
        token=at,
        begins=max(0, at - DIVERGENCE_TOKENS_BEFORE),
        message=divergence.message if divergence else 0,
        message_last=divergence.message_last if divergence else 0,
        role=divergence.role if divergence else "",
    )
