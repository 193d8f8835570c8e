"""Rows of the index and its replies: plain values, no I/O."""

from typing import Annotated, Literal

import msgspec

from warmline_common.protocol.messages import CheckpointRef, SegmentRef, SegmentSpec

FileId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]  # also the file's name
RootId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]  # a root of chains, in hex
MaybeFileId = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]  # "" for none
Hash = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]  # xxh3_128
CallId = Annotated[str, msgspec.Meta(pattern="^call_[0-9a-f]{24}$")]
Position = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # in tokens


class SegmentRow(msgspec.Struct, kw_only=True):
    """An immutable file with the rows of [start, end), on top of a parent.

    Siblings differ at their first token (a radix tree): `parent.start < start <= parent.end`, and where
    `start < parent.end` the child leaves its parent's tokens in the middle.  Its tokens have a table of their own.
    """

    id: FileId
    parent: MaybeFileId  # "" at the root
    root: Hash  # namespace(fingerprint, tenant)
    model: str  # served model's name, for people and purge
    start: Position
    end: Position
    bytes_on_disk: int = 0
    checksum: str = ""
    created: float = 0.0  # Unix seconds
    session: str = ""  # id of the conversation that wrote it
    prefill_s: float = 0.0  # of these rows; eviction weighs it against the bytes
    pinned: bool = False


class CheckpointRow(msgspec.Struct, kw_only=True):
    """The state of all recurrent layers at `position`, on the path through `segment` (start < position <= end)."""

    id: FileId
    segment: FileId
    position: Position
    bytes_on_disk: int = 0
    checksum: str = ""
    created: float = 0.0


class FileUsage(msgspec.Struct, kw_only=True):
    """Bookkeeping of a segment or checkpoint, kept apart so that a hit does not rewrite its row."""

    hits: int = 0
    last_used: float = 0.0


PREWARM_CLIENT = "prewarm:"  # `SessionRow.client` of prompts computed ahead begins so


class SessionRow(msgspec.Struct, kw_only=True):
    """A conversation: the path from the root to `leaf`.

    It goes on with the next prompt whose first `turn_end` tokens have `turn_digest`: the tail that was generated after
    them may come back rendered differently.
    """

    id: str  # 12 hex digits
    root: Hash
    model: str
    leaf: FileId  # deepest segment
    tokens: Position
    turn_end: Position  # last message boundary of its last prompt (all tokens where that is unknown)
    turn_digest: Hash  # xxh3_128 of the packed tokens [0, turn_end)
    turn_segment: MaybeFileId  # where `turn_end` lies; "" once that is no longer stored
    created: float
    last_used: float
    requests: int = 1
    hits: int = 0
    client: str = ""  # the client's name for it (X-Session-ID ...); a hint for people, never proof
    title: str = ""  # first words of its first user message; "" where there are none, or `titles` is off
    pinned: bool = False  # files that were stored when it was pinned are not evicted

    @property
    def label(self) -> str:
        """Name for people: the title, else the client's name for it, else ""."""
        return self.title or self.client


class TurnRow(msgspec.Struct, kw_only=True):
    """An answer that called tools, as it was sampled."""

    root: Hash  # namespace(fingerprint, tenant)
    model: str
    session: str = ""  # the conversation; "" where nothing of it was stored
    calls: Annotated[list[CallId], msgspec.Meta(min_length=1)]
    tokens: bytes  # u32le
    at: float  # Unix seconds


class ResponseRow(msgspec.Struct, kw_only=True):
    """A stored response of OpenAI's Responses.  Its text has a table of its own, `response_bodies`."""

    id: str  # of the request that it answers; clients see it as "resp_ID"
    owner: str  # tenant of the only key that may read it, also where the cache is shared; "" without keys
    root: Hash  # of its KV: namespace(fingerprint, owner), or of the tenant that shares the cache
    fingerprint: str
    model: str
    session: str = ""  # the conversation; "" where nothing of it was stored, or not yet
    # Keys of its own id, and of the ids of its items.
    items: Annotated[bytes, msgspec.Meta(min_length=16)] = msgspec.field(name="answers")
    turn_end: Position = 0  # of its prompt: PromptReply.turn_end, or its end where that is unknown
    turn_digest: bytes = b""  # of the prompt's tokens up to there, as in SessionRow
    tokens: bytes = b""  # u32le: the prompt's, until the conversation is known
    bytes_body: int = 0  # as stored
    at: float  # Unix seconds


DIVERGENCE_TOKENS_BEFORE, DIVERGENCE_TOKENS_AFTER = 32, 96  # shown on both sides of a divergence


class Divergence(msgspec.Struct, kw_only=True):
    """Divergence of a prompt from the longest known prefix, with both sides' tokens there.

    As private as the prompts themselves: every purge deletes all of them.
    """

    at: Position  # the first token that differs
    begins: Position  # start of both windows, somewhat before
    stored: bytes  # u32le: the known tokens from there on
    prompt: bytes  # u32le: the prompt's tokens
    stored_text: str = ""  # the same as text; "" where the backend could not decode it
    prompt_text: str = ""
    segment: MaybeFileId = ""  # in which the known tokens are stored; "" where they were in memory alone
    message: int = 0  # of the prompt, from 1; 0 for tools, or where that is not known
    message_last: int = 0  # more than `message` where it is one of several
    role: str = ""  # "tools" for tools; "" where that is not known
    messages: int = 0  # of the prompt in all, as far as is known
    comes_later: bool = False  # the prompt's tokens stand further on in the known ones
    cause: str = ""  # the likeliest one, as `causes` names them


def count_reached_tokens(outcome: str, prompt: int, cached: int, prefilled: int) -> int:
    """Tokens of a request's prompt that were reused or computed; an answered one has reached all."""
    return prompt if outcome == "ok" else min(prompt, cached + prefilled)


class TtftParts(msgspec.Struct, kw_only=True, frozen=True):
    """Parts of the time to the first token, in seconds: measured or expected."""

    render_s: float = 0.0  # of the prompt's rendering and tokenizing, by the backend
    plan_s: float = 0.0  # of all else that the proxy does before it sends the request on
    restore_s: float = 0.0
    wait_s: float = 0.0  # before the engine begins, and for others' chunks and steps in its prefill
    prefill_s: float = 0.0
    first_step_s: float = 0.0  # from the prefill's end to the first token at the client

    @property
    def total_s(self) -> float:
        return self.render_s + self.plan_s + self.restore_s + self.wait_s + self.prefill_s + self.first_step_s

    def list_named(self) -> list[tuple[str, float]]:
        """Parts by their names, such as "render", in order."""
        return [(name.removesuffix("_s"), getattr(self, name)) for name in self.__struct_fields__]


class RequestRecord(msgspec.Struct, kw_only=True):
    """Record of one request; the last N are kept."""

    id: str
    at: float  # Unix seconds
    endpoint: str
    client_model: str
    model: str = ""  # that served it
    session: str = ""
    outcome: str  # "ok", "error", "cancelled"
    source: str  # "resident", "restored", "shared", "cold"
    why_not_warmer: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    saved_tokens: int = 0
    decode_passes: int = 0  # that computed the answer
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those drafted
    accepted_by_source: dict[str, int] = {}  # the same, for each source that drafted some
    no_drafts: str = ""  # why nothing was drafted
    queue_s: float = 0.0  # from the arrival until the engine began to work on it, without `restore_s`
    waits: dict[str, float] = {}  # the same, by reason (see protocol/waits.py), and what it waited for in its prefill
    restore_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    total_s: float = 0.0
    ttft_parts: TtftParts = TtftParts()  # of `ttft_s`; where there was no first token, of what was done
    expected_ttft_s: float = 0.0  # as planned; 0.0: nothing was planned
    expected_parts: TtftParts = TtftParts()
    key: str = ""  # name of the client key that it showed; "" without one
    root: bytes = b""  # namespace of its prompt; b"" where it had none
    parting: Divergence | None = None  # from the longest known prefix
    error: str = ""
    dispatches: int = 1  # more than one where the backend was lost under it
    audit: str = ""  # computed again, cold: "equal", "within", "differs", "unstable" or "abandoned"; "": it was not
    guard: str = ""  # how its answer collapsed; "model: ..." or "cache: ..." once the cause is known

    @property
    def reached_tokens(self) -> int:
        """Prompt tokens that were reused or computed: not all where it was cancelled, or failed, in its prefill."""
        return count_reached_tokens(self.outcome, self.prompt_tokens, self.cached_tokens, self.prefilled_tokens)


class PrefixMatch(msgspec.Struct, kw_only=True):
    """The longest stored prefix of a prompt: every token compared."""

    tokens: int  # 0 where nothing matches
    chain: list[SegmentRef]  # root first, no gaps; the last one's `upto` is `tokens`
    checkpoints: list[CheckpointRef]  # on this path at positions <= tokens, ascending
    end_reason: str  # why it is not longer: "nothing stored", "stored up to token 812", "evicted", "all of it" ...
    is_divergent: bool = False  # other tokens are stored there
    divergent_tokens: bytes = b""  # u32le: the first of these, of the youngest branch
    divergent_segment: MaybeFileId = ""  # the segment that they begin in


class SavePlan(msgspec.Struct, kw_only=True):
    """Plan of a save.  It is in the index (as being written) until it is committed or aborted."""

    id: str
    root: bytes
    model: str
    matched: int  # tokens that were stored already
    tokens: bytes  # u32le of [0, end of the last segment)
    segments: list[SegmentSpec]
    checkpoints: list[CheckpointRef]
    bytes_expected: int  # reserved in the budget until it is over
    replaces: str = ""  # a small parent that the first segment swallows

    @property
    def file_ids(self) -> list[str]:
        return [spec.id for spec in self.segments] + [ref.id for ref in self.checkpoints]


class SessionUpdate(msgspec.Struct, kw_only=True):
    """Facts about the conversation that a request belongs to."""

    turn_end: int  # PromptReply.turn_end
    client: str = ""
    title: str = ""
    hit: bool = False  # the request reused a block or more
    requests: int = 1  # 0 where a part of a request is saved


class SaveResult(msgspec.Struct, kw_only=True):
    session: str  # the conversation's id; "" where nothing of it is stored
    tokens_saved: int
    removed: list[str]  # segments swallowed, and files written in vain; deleted, or to be once their leases end
    why_not: str = ""  # why (a part of) the plan was dropped


class QuarantineRow(msgspec.Struct, kw_only=True):
    """A file taken out of the tree; it lies in segments/quarantine/ until a purge, or until its room is needed."""

    id: FileId
    kind: Literal["segment", "checkpoint"]
    model: str
    start: Position
    end: Position
    bytes_on_disk: int
    reason: str
    at: float


class IndexSnapshot(msgspec.Struct, kw_only=True):
    """Everything stored but tokens, by id, at one moment."""

    segments: dict[str, SegmentRow]
    checkpoints: dict[str, CheckpointRow]
    sessions: dict[str, SessionRow]
    quarantined: dict[str, QuarantineRow]
    usage: dict[str, FileUsage]

    def segment_path(self, segment_id: str) -> list[SegmentRow]:
        """From the root to this segment."""
        rows: list[SegmentRow] = []
        while segment_id in self.segments:
            rows.append(self.segments[segment_id])
            segment_id = rows[-1].parent
        return rows[::-1]


class IndexFinding(msgspec.Struct, kw_only=True):
    """Finding of `verify` about the index or a file."""

    what: str  # "tree", "block", "session", "sum", "missing", "orphan", "checksum" ...
    id: str
    detail: str


class PurgeRequest(msgspec.Struct, kw_only=True):
    """POST /warmline/purge of the proxy; exactly one of the first six is given."""

    session: str = ""
    model: str = ""
    key: str = ""  # an owner: a client key's name, or another label of `OwnerLabels`
    roots: list[RootId] | None = None  # the same, by all roots that are theirs
    older_than_s: float | None = None
    everything: bool = False
    dry_run: bool = False


class Truncation(msgspec.Struct, kw_only=True):
    """A shared segment that loses the rows from `until` on, which no other conversation needs.

    It becomes another file; where it can't (`why_not`), all of it stays.
    """

    segment: FileId
    until: Position
    end: Position  # where it ended
    bytes_count: int  # of the rows that are cut away, or stay
    became: MaybeFileId = ""  # "" where it is not cut (yet)
    why_not: str = ""


class PurgeReply(msgspec.Struct, kw_only=True):
    """Result of a purge, or its preview."""

    sessions: list[str]
    segments: list[str]  # whole ones
    checkpoints: list[str]
    quarantined: list[str]
    bytes_freed: int  # of files, and of rows that are cut away
    dry_run: bool
    responses: int = 0  # count of stored responses
    cuts: list[Truncation] = []


class PinRequest(msgspec.Struct, kw_only=True):
    """POST /warmline/pin of the proxy."""

    session: str
    off: bool = False  # let it be evicted again


class PinReply(msgspec.Struct, kw_only=True):
    session: str
    pinned: bool
    segments: list[str]  # that are now, or no longer are
    bytes_pinned: int  # of all that is pinned now
    bytes_pinned_max: int


class GcRequest(msgspec.Struct, kw_only=True):
    """POST /warmline/gc of the proxy."""

    to_bytes: int | None = None  # evict until no more are used; None: until the budget holds


class GcReply(msgspec.Struct, kw_only=True):
    """Counts of deleted entries and files, and bytes used on disk."""

    evicted: list[str] = []  # segments, checkpoints and quarantined files
    orphans: int = 0  # files without a row
    drafts: int = 0  # of saves and compactions that were killed
    bytes_strays: int = 0  # of these two
    doomed: int = 0  # files whose rows were gone already
    records: int = 0  # of requests, too old
    turns: int = 0  # sampled, too old, of conversations that are not stored
    responses: int = 0  # stored ones, too old or too many
    notes: int = 0  # on why something is no longer stored
    cuts: list[Truncation] = []  # rows that only deleted conversations needed
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_wanted: int = 0  # more are left only for pinned files and files in use
    bytes_index_before: int = 0
    bytes_index_after: int = 0


class RepairReply(msgspec.Struct, kw_only=True):
    """Answer of POST /warmline/repair."""

    did: list[IndexFinding]  # `what`: "adopted", "quarantined", "deleted", "dropped", "session", "entries", "mode"


class SegmentTextsRequest(msgspec.Struct, kw_only=True):
    """POST /warmline/texts of the proxy: these packed tokens as text of the model that wrote the segment."""

    segment: FileId
    sequences: list[bytes]


class ReplayRequest(msgspec.Struct, kw_only=True):
    """POST /warmline/replay of the proxy."""

    session: str = ""  # "": the `count` last used ones
    count: int = 32


class ReplayResult(msgspec.Struct, kw_only=True):
    """A conversation's first token, computed from its stored KV and again cold."""

    session: str
    tokens: int  # that are stored
    reused: int = 0  # of these
    outcome: str  # "equal", "within", "differs", "unstable", "damaged", or "skipped"
    difference: float = 0.0  # in log-probability, of the likely tokens
    tolerance: float = 0.0  # 0 in exact mode
    quarantined: int = 0  # files
    detail: str = ""


class ReplayReply(msgspec.Struct, kw_only=True):
    replays: list[ReplayResult]


class Sums(msgspec.Struct, kw_only=True):
    """Sums over the tables, kept in the index."""

    segments: int = 0
    checkpoints: int = 0
    sessions: int = 0
    quarantined: int = 0
    tokens: int = 0
    bytes_segments: int = 0
    bytes_checkpoints: int = 0
    bytes_quarantined: int = 0
    bytes_writing: int = 0  # reserved by saves under way
    bytes_doomed: int = 0  # files whose rows are gone, about to be deleted
    turns: int = 0
    bytes_turns: int = 0  # within the index
    responses: int = 0
    bytes_responses: int = 0  # within the index


class Totals(Sums, kw_only=True):
    """Totals of the disk."""

    bytes_index: int

    @property
    def bytes_used(self) -> int:
        """Bytes that count against the budget."""
        files = self.bytes_segments + self.bytes_checkpoints + self.bytes_quarantined
        return files + self.bytes_writing + self.bytes_doomed + self.bytes_index
