"""Comparison of two stored conversations: their common prefix and the first difference.  Reads the index."""

import msgspec

from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens, unpack_tokens
from warmline_proxy.explain.explain import DiffSide, DivergencePoint, make_point, make_sides
from warmline_proxy.index.index import IndexReader
from warmline_proxy.store.rows import DIVERGENCE_TOKENS_AFTER, DIVERGENCE_TOKENS_BEFORE, RequestRecord, SessionRow


class StoredConversation(msgspec.Struct, kw_only=True, frozen=True):
    """Conversation of a session, or along a segment's path."""

    id: str
    leaf: str  # last segment of the path
    root: bytes
    tokens: bytes


class Comparison(msgspec.Struct, kw_only=True):
    """Result of a comparison, printed by `cachectl diff --json`."""

    a: str
    b: str
    tokens_a: int
    tokens_b: int
    common: int  # length of the common prefix, in tokens
    same_root: bool  # one model and one key; else neither is ever reused for the other
    where: DivergencePoint | None = None  # None where one of them ends there
    side_a: DiffSide | None = None
    side_b: DiffSide | None = None
    why_no_text: str = ""


def load_conversation(reader: IndexReader, kind: str, row_id: str) -> StoredConversation | None:
    """Load a session's or segment's (`kind`) conversation; None where it is not stored.  Raises IndexStoreError."""
    row = reader.session(row_id) if kind == "session" else reader.segment(row_id)
    if row is None:
        return None
    leaf, count = (row.leaf, row.tokens) if isinstance(row, SessionRow) else (row_id, row.end)
    tokens = reader.path_tokens(leaf)[: count * TOKEN_BYTES]
    return StoredConversation(id=row_id, leaf=leaf, root=row.root, tokens=tokens)


def compare_conversations(a: StoredConversation, b: StoredConversation, records: list[RequestRecord]) -> Comparison:
    """Compare, without texts; the record of a request that diverged there names the message.  Pure."""
    at = count_common_tokens(a.tokens, b.tokens)
    len_a, len_b = len(a.tokens) // TOKEN_BYTES, len(b.tokens) // TOKEN_BYTES
    found = Comparison(a=a.id, b=b.id, tokens_a=len_a, tokens_b=len_b, common=at, same_root=a.root == b.root)
    if at < min(len_a, len_b):
        divergences = (each.parting for each in records if each.parting and each.session in (a.id, b.id))
        divergence = next((each for each in divergences if each.at == at), None)
        found.where = make_point(at, max(0, at - DIVERGENCE_TOKENS_BEFORE), divergence)
        tokens_a, tokens_b = map(unpack_tokens, cut_windows(a, b, at))
        found.side_a, found.side_b = make_sides(tokens_a, "", tokens_b, "")
    return found


def cut_windows(a: StoredConversation, b: StoredConversation, at: int) -> tuple[bytes, bytes]:
    """Cut the packed tokens around token `at` out of both."""
    begins, ends = max(0, at - DIVERGENCE_TOKENS_BEFORE) * TOKEN_BYTES, (at + DIVERGENCE_TOKENS_AFTER) * TOKEN_BYTES
    return a.tokens[begins:ends], b.tokens[begins:ends]


def add_texts(found: Comparison, text_a: str, text_b: str) -> Comparison:
    """Add the texts of both sides' tokens, which it must have."""
    assert found.side_a is not None and found.side_b is not None
    side_a, side_b = make_sides(found.side_a.tokens, text_a, found.side_b.tokens, text_b)
    return msgspec.structs.replace(found, side_a=side_a, side_b=side_b)
