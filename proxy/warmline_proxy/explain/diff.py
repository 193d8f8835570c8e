"""Two stored conversations side by side: how far they are the same, and where they part.  Reads the index."""

import msgspec

from warmline_common.protocol.tokens import TOKEN_BYTES, common_prefix, unpack_tokens
from warmline_proxy.explain.explain import Side, Where
from warmline_proxy.explain.text_diff import differences
from warmline_proxy.index.index import IndexReader
from warmline_proxy.store.rows import AFTER_TOKENS, BEFORE_TOKENS, RequestRecord


class Stored(msgspec.Struct, kw_only=True, frozen=True):
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
    where: Where | None = None  # None where one of them ends there
    side_a: Side | None = None  # what stands there
    side_b: Side | None = None
    why_no_text: str = ""


def stored(reader: IndexReader, kind: str, row_id: str) -> Stored | None:
    """None where it is no longer there.  Raises IndexFailure."""
    if kind == "session":
        session = reader.session(row_id)
        if session is None:
            return None
        tokens = reader.stored_tokens(session.leaf)[: session.tokens * TOKEN_BYTES]
        return Stored(kind=kind, id=row_id, leaf=session.leaf, root=session.root, model=session.model, tokens=tokens)
    row = reader.segment(row_id)
    if row is None:
        return None
    tokens = reader.stored_tokens(row_id)
    return Stored(kind=kind, id=row_id, leaf=row_id, root=row.root, model=row.model, tokens=tokens)


def compare(a: Stored, b: Stored, records: list[RequestRecord]) -> Comparison:
    """Without texts.  A request that came by where they part knows its message.  Pure."""
    at = common_prefix(a.tokens, b.tokens)
    found = Comparison(
        a=a.id,
        b=b.id,
        tokens_a=len(a.tokens) // TOKEN_BYTES,
        tokens_b=len(b.tokens) // TOKEN_BYTES,
        common=at,
        same_root=a.root == b.root,
    )
    if at < min(found.tokens_a, found.tokens_b):
        found.where = _where(at, {a.id, b.id}, records)
        found.side_a, found.side_b = (
            Side(tokens=unpack_tokens(window), text="", differs=[]) for window in windows(a, b, at)
        )
    return found


def windows(a: Stored, b: Stored, at: int) -> tuple[bytes, bytes]:
    """Packed: what stands around that token."""
    begins, ends = max(0, at - BEFORE_TOKENS) * TOKEN_BYTES, (at + AFTER_TOKENS) * TOKEN_BYTES
    return a.tokens[begins:ends], b.tokens[begins:ends]


def with_texts(found: Comparison, text_a: str, text_b: str) -> Comparison:
    """Where there are sides."""
    assert found.side_a is not None and found.side_b is not None
    ranges_a, ranges_b = differences(text_a, text_b)
    return msgspec.structs.replace(
        found,
        side_a=msgspec.structs.replace(found.side_a, text=text_a, differs=ranges_a),
        side_b=msgspec.structs.replace(found.side_b, text=text_b, differs=ranges_b),
    )


def _where(at: int, sessions: set[str], records: list[RequestRecord]) -> Where:
    partings = (each.parting for each in records if each.parting and each.session in sessions)
    seen = next((each for each in partings if each.at == at), None)
    return Where(
        token=at,
        begins=max(0, at - BEFORE_TOKENS),
        message=seen.message if seen else 0,
        message_last=seen.message_last if seen else 0,
        role=seen.role if seen else "",
    )
