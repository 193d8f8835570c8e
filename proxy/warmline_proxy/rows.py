"""What the index stores and what it answers: plain values, no I/O."""

import msgspec
from warmline_wire.messages import CheckpointRef, SegmentRef, SegmentSpec


class SegmentRow(msgspec.Struct, kw_only=True):
    """An immutable file with the rows of [start, end), on top of a parent.

    Siblings differ at their first token (a radix tree): `parent.start < start <= parent.end`, and where
    `start < parent.end` the child leaves its parent's tokens in the middle.
    """

    id: str  # 32 hex digits; the file's name
    parent: str  # "" at the root
    root: bytes  # namespace(fingerprint, tenant)
    model: str  # served model's name, for people and purge
    start: int
    end: int
    tokens: bytes  # u32le of [start, end)
    state: str  # "writing" or "ready"
    bytes_on_disk: int = 0
    checksum: str = ""
    created: float = 0.0  # Unix seconds
    prefill_s: float = 0.0  # what computing these rows cost; eviction weighs it against the bytes
    pinned: bool = False


class CheckpointRow(msgspec.Struct, kw_only=True):
    """The state of all recurrent layers at `position`, on the path through `segment` (start < position <= end)."""

    id: str
    segment: str
    position: int
    state: str
    bytes_on_disk: int = 0
    checksum: str = ""
    created: float = 0.0


class Usage(msgspec.Struct, kw_only=True):
    """Bookkeeping of a segment, kept apart so that a hit does not rewrite its tokens."""

    hits: int = 0
    last_used: float = 0.0


class SessionRow(msgspec.Struct, kw_only=True):
    """A conversation: the path from the root to `leaf`."""

    id: str  # 12 hex digits
    root: bytes
    model: str
    leaf: str  # deepest segment
    tokens: int
    turn_end: int  # last message boundary of its last prompt; a prompt that matches beyond it goes on with this session
    created: float
    last_used: float
    requests: int = 1
    hits: int = 0
    client: str = ""  # what the client called it (X-Session-ID ...); a hint for people, never proof


class RequestRecord(msgspec.Struct, kw_only=True):
    """What happened to one request; the last N are kept."""

    id: str
    at: float  # Unix seconds
    endpoint: str
    client_model: str
    session: str = ""
    outcome: str  # "ok", "error", "cancelled"
    source: str  # "resident", "restored", "cold"
    why_not_warmer: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    saved_tokens: int = 0
    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    total_s: float = 0.0
    error: str = ""


class Match(msgspec.Struct, kw_only=True):
    """The longest stored prefix of a prompt: every token compared."""

    tokens: int  # 0 where nothing matches
    chain: list[SegmentRef]  # root first, no gaps; the last one's `upto` is `tokens`
    checkpoints: list[CheckpointRef]  # on this path at positions <= tokens, ascending
    bytes_to_read: int
    why: str  # why it is not longer: "nothing stored", "differs at token 812", "evicted", "all of it" ...


class SavePlan(msgspec.Struct, kw_only=True):
    """What a save must write; its rows stand in the index as "writing" until it is committed or aborted."""

    root: bytes
    matched: int  # tokens that were stored already
    segments: list[SegmentSpec]
    checkpoints: list[CheckpointRef]
    replaces: str = ""  # a small parent that the first segment swallows


class Totals(msgspec.Struct, kw_only=True):
    """What is on disk."""

    segments: int
    checkpoints: int
    sessions: int
    tokens: int
    bytes_segments: int
    bytes_checkpoints: int
    bytes_index: int
