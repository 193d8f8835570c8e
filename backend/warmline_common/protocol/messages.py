"""Contract of the backend as msgspec structs.  JSON on the wire; `bytes` fields travel as base64; token ids are u32le.

Replies about KV carry `boot` and `generation`: `boot` changes when the backend process does, `generation` grows by
one each time the backend evicts a resident on its own.  A proxy that sees either change lists what has changed
(``GET /kv/residents?since=REVISION``).
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from warmline_common.measurement.recent_durations import WorkDuration
from warmline_common.process.redaction import redact

# Request headers of a generation call, set by the proxy.
HEADER_REQUEST = "X-Warmline-Request"  # request id; asks for the closing `GenerationResult`
HEADER_PROMPT = "X-Warmline-Prompt"  # id from POST /kv/prompts; no body is read then, a stream with usage comes
HEADER_RESIDENT = "X-Warmline-Resident"  # resident to continue
HEADER_REUSE = "X-Warmline-Reuse"  # tokens of it to reuse; 1 <= reuse < prompt tokens
HEADER_KEEP = "X-Warmline-Keep"  # "1": the resident is copied and stays; without it the request takes it over
HEADER_FOLLOW = "X-Warmline-Follow"  # request id of a generation that is computing the prompt's first `reuse` tokens
HEADER_CHECKPOINTS = "X-Warmline-Checkpoints"  # "120,800": positions at which recurrent state is to be kept
HEADER_ROOT = "X-Warmline-Root"  # namespace(fingerprint, tenant) in hex: owner of the prompt and of its KV
HEADER_BACKGROUND = "X-Warmline-Background"  # computed only while the engine is idle otherwise: one of these two
BACKGROUND_DROP, BACKGROUND_KEEP = "1", "keep"  # no KV is kept; it is kept, also after a cancel
# Response headers, from the proxy to its client.
HEADER_CACHE = "X-Warmline-Cache"  # "resident 812", "restored 812", "shared 812" or "cold 0"
HEADER_STABILIZED = "X-Warmline-Stabilized"  # "times=2, ids=1": replacements at the top of the prompt

# Request headers, from a client to the proxy: its own deadlines in seconds, and its own name for the request.
HEADER_CONNECT_TIMEOUT = "X-Warmline-Connect-Timeout"
HEADER_QUEUE_TIMEOUT = "X-Warmline-Queue-Timeout"
HEADER_STALL_TIMEOUT = "X-Warmline-Stall-Timeout"
HEADER_TOTAL_TIMEOUT = "X-Warmline-Total-Timeout"

RESULT_EVENT = "warmline"  # SSE event name of the closing event
SEGMENT_FORMAT = 2

T = TypeVar("T")

_decoders: dict[Any, Callable[[Any], Any]] = {}
_decoders_lock = threading.Lock()


class Reply(msgspec.Struct, kw_only=True):
    """Base of every reply but plain acknowledgements (a deleted resident, an eviction order)."""

    boot: str
    generation: int


class SampledTurn(msgspec.Struct, kw_only=True, frozen=True):
    """Answer that called tools, as it was sampled.

    Clients send calls back as parsed; a template renders them with other spaces, orders and escapes than the model
    sampled.  Where the calls are still the same, these tokens replace the template's text in the prompt, so that the
    prefix stays equal.
    """

    calls: list[str]  # their ids, in order
    tokens: bytes  # u32le: what was sampled after the reasoning, up to the end of the last call


class PromptRequest(msgspec.Struct, kw_only=True):
    """POST /kv/prompts: validate, render and tokenize a client's body once."""

    request_id: str
    endpoint: str  # "chat" or "completion"
    body: dict[str, Any]
    turns: list[SampledTurn] = []  # those with calls that the body repeats, as far as the proxy has them
    root: bytes = b""  # namespace; a text's tokens are taken from earlier prompts of the same one


class MessageEnd(msgspec.Struct, kw_only=True, frozen=True):
    """End of a message in its prompt, for explanations in terms of messages."""

    end: int  # token offset
    number: int  # of the message, from 1; 0 for tools before all messages
    role: str
    note: str = ""  # parts of it that are not in the prompt


class PromptReply(Reply, kw_only=True):
    prompt_id: str
    tokens: bytes  # u32le ids of the whole prompt, generation prompt included
    boundaries: list[int]  # token offsets, ascending: the end of system and tools first, then the ends of messages
    turn_end: int  # the last boundary before the generation prompt (and a think tail); 0 when unknown
    messages: list[MessageEnd] = []  # ascending; not every message's end is known
    tokens_max: int  # how many tokens the request may still generate (its own limit or the model's)
    fingerprint: str
    kv_bytes: int = 0  # that the prompt and the beginning of its answer take alone


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /kv/texts: text of token sequences, special tokens included, for people."""

    sequences: list[bytes]  # u32le ids


class DetokenizeReply(msgspec.Struct, kw_only=True):
    texts: list[str]  # one a sequence; a character that one of its ends cuts is U+FFFD


class SegmentRef(msgspec.Struct, kw_only=True):
    """Link of a restorable chain: the rows [start, upto) of a segment whose file holds [start, end)."""

    id: str  # 32 hex digits, also the file's name
    start: int
    end: int
    upto: int


class CheckpointRef(msgspec.Struct, kw_only=True):
    """File with the state of all recurrent layers at `position`."""

    id: str
    position: int


class RestoreRequest(msgspec.Struct, kw_only=True):
    """POST /kv/restore: a chain, root first and without gaps, into a new resident of `position` tokens."""

    request_id: str
    tokens: bytes  # u32le ids of [0, position)
    chain: list[SegmentRef]
    checkpoint: CheckpointRef | None = None  # required where the layout has states
    root: bytes = b""  # as in SaveRequest; each file must name it and the digest of the tokens before it
    prompt_tokens: int = 0  # of the request to come: buffers get room for its rest and a part of its answer; 0: none


class RestoreReply(Reply, kw_only=True):
    resident: str
    position: int
    bytes_read: int
    seconds: float
    waits: dict[str, float] = {}  # seconds before it could begin, by reason (see waits.py)


class RestoreRefusal(Reply, kw_only=True):
    """409 of POST /kv/restore: the file at fault, the reason, and the verified prefix of the chain."""

    reason: str  # "missing", "truncated", "checksum", "foreign", "tokens", "rows", "io"
    bad: str  # id of the segment or checkpoint at fault
    good_prefix: int  # tokens
    detail: str


class SegmentSpec(msgspec.Struct, kw_only=True):
    """Segment to be written: rows [start, end)."""

    id: str
    start: int
    end: int
    parent: str = ""  # id of the segment that it continues; "" at the root


class SaveRequest(msgspec.Struct, kw_only=True):
    """POST /kv/save: write segments and checkpoints of a resident (or of the running request that took it over)."""

    request_id: str
    resident: str = ""  # either this ...
    running: str = ""  # ... or the request id of a running request
    segments: list[SegmentSpec] = []
    checkpoints: list[CheckpointRef] = []
    root: bytes = b""  # namespace(fingerprint, tenant); in the files, too, so that an index can be rebuilt
    write_timeout_s: float = 0.0  # for the disk, all files together, without waits for the engine; 0.0: no limit
    disk_used_share: float = 0.0  # of the disk budget, with this save


class SavedFile(msgspec.Struct, kw_only=True):
    id: str
    bytes_written: int
    checksum: str  # xxh3-64 hex over the file's tensor checksums


class SaveReply(Reply, kw_only=True):
    """Reply of a save: all files are durable (fsync'ed and renamed)."""

    segments: list[SavedFile]
    checkpoints: list[SavedFile]
    seconds: float


class Resident(msgspec.Struct, kw_only=True):
    """KV in the backend's memory for one token sequence."""

    id: str
    tokens: int
    positions: list[int]  # where it can be continued, ascending; empty means: anywhere up to `tokens`
    bytes_held: int
    last_used: float  # Unix seconds
    ids: bytes | None = None  # u32le; only on GET /kv/residents?ids=1
    root: bytes = b""  # owner: the `HEADER_ROOT` of the request that left it, or the root of its restore


class ResidentsReply(Reply, kw_only=True):
    """GET /kv/residents: all residents, or with `since=N` those added after the listing with `revision` N.

    With `ids=1` they have their token ids; with `ids=ID,ID ...` these residents alone are listed, with token ids.
    """

    residents: list[Resident]
    revision: int = 0  # grows by one with each resident that is added or removed
    since: int = 0  # as asked for; 0: all residents, also where the backend no longer knows what has changed since
    removed: list[str] = []  # ids of residents removed after `since`


RESIDENT_IDS_MAX = 256  # named in one GET /kv/residents?ids=


class EvictionOrder(msgspec.Struct, kw_only=True):
    """PUT /kv/residents/order: residents to evict first under pressure; those not named go last, oldest first."""

    drop_first: list[str]
    extends: bool = False  # after those named before, which stay; else in place of these


class ClearCacheRequest(msgspec.Struct, kw_only=True):
    """POST /kv/forget: clear all KV of conversations, except of those being computed."""

    keep: list[str] = []  # ids that stay, of residents or of their requests: KV that is stored nowhere else


class KvLayout(msgspec.Struct, kw_only=True):
    """Bytes of one token and one state, and the capabilities of the model's caches."""

    row_bytes: int  # bytes of one token's rows over all layers
    state_bytes: int  # bytes of one checkpoint; 0 where the model has no recurrent layers
    has_rows: bool
    has_states: bool
    has_windows: bool  # rotating layers: a resident keeps only the last rows of these
    persistent: bool  # every cache class has a codec
    families: list[str]  # cache class names, for people
    why_not: str = ""
    grid: int = 0  # exact mode: KV ends, and is reused, only at multiples of so many tokens; 0: anywhere
    dtype: str = ""  # of the KV: "float32", "bfloat16", "float16", or its bits: "q8", "q8,4", "q8,4+q8"


class MemoryShare(msgspec.Struct, kw_only=True):
    """PUT /kv/memory, from the keeper: part of the machine's memory that this backend may use from now on."""

    kv_bytes: int  # budget for residents and running requests; at most the one that it was started with
    usable_bytes: int  # all that its process may take: weights, KV, what a step works with, and what is lost between


class MemoryShareReply(Reply, kw_only=True):
    """Budget in force: what is asked for, or what running and unsaved KV holds, where that is more."""

    kv_bytes: int


class PrefillRate(msgspec.Struct, kw_only=True):
    tokens: int  # at this context length
    tokens_per_s: float


class ProcessStats(msgspec.Struct, kw_only=True):
    """Resources that a process holds, for leak checks."""

    tasks: int = 0
    threads: int = 0
    descriptors: int = 0
    bytes_unaccounted: int = 0  # the backend's: mlx memory beyond weights, residents and running requests


LOADING = "the model is still loading"  # `HealthReply.failure` meanwhile


class HealthReply(msgspec.Struct, kw_only=True):
    """GET /health of the backend, without a secret: progress of its engine.  Answered at once, also during a step."""

    boot: str
    pid: int
    ready: bool  # the model is loaded and the engine lives
    busy: bool  # a step is being computed
    steps: int  # chunks, decode steps and commands done since the start
    step_age_s: float  # how long the present step has been going on; 0.0 between steps
    slowest_recent_step_s: float
    failure: str = ""  # why it is not ready


class BackendStatus(Reply, kw_only=True):
    """GET /kv/status."""

    ready: bool
    model: str
    model_path: str
    fingerprint: str
    layout: KvLayout | None
    context_tokens_max: int
    memory_budget_bytes: int  # at present
    resident_bytes: int
    running_bytes: int
    residents: int
    running: int
    queued: int
    prefill_rates: list[PrefillRate]
    decode_tokens_per_s: float
    restore_bytes_per_s: float
    save_bytes_per_s: float
    slowest_recent_step_s: float
    prefill_step_size: int
    chunk_durations: list[WorkDuration] = []  # by tokens and their context, the warm-up's too
    decode_step_s: float = 0.0  # usual duration of late; 0.0 before the first
    releasing: int = 0  # generations whose client is gone: at the end of the engine's step their KV becomes residents
    keepalive_steps: int = 0  # tokens computed for no request, to keep the device awake
    failure: str = ""
    model_created: int = 0  # when its config was last written, in Unix seconds; 0: unknown
    device: str = ""  # that computes, for people
    vitals: ProcessStats = msgspec.field(default_factory=ProcessStats)


class FirstLogits(msgspec.Struct, kw_only=True):
    """Log-probabilities that a request's first token was chosen from, before any of its own processors."""

    digest: str  # xxh3_128 in hex over the whole row as float32, little-endian
    ids: bytes  # u32le: the likeliest tokens, likeliest first
    logprobs: bytes  # float32, little-endian: one for each of `ids`


class DraftCount(msgspec.Struct, kw_only=True):
    """Tokens drafted after the next one, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0


class Timings(msgspec.Struct, kw_only=True):
    waits: dict[str, float] = msgspec.field(default_factory=dict)  # seconds since the call, by reason (see waits.py)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefilled: int = 0  # tokens computed in prefill
    decoded: int = 0
    passes: int = 0  # decode steps that computed its tokens
    shared_passes: int = 0  # of these, in a batch with others
    drafts: dict[str, DraftCount] = msgspec.field(default_factory=dict)  # by source
    no_drafts: str = ""  # why no token was drafted
    predicted: int | None = None  # tokens that the client foresaw; None where they were not compared
    chunks: list[WorkDuration] = []  # its last ones, by tokens and their context

    def record_draft(self, source: str, drafted: int, accepted: int) -> None:
        count = self.drafts.setdefault(source, DraftCount())
        count.drafted += drafted
        count.accepted += accepted


class GenerationResult(Reply, kw_only=True):
    """Closing event of a stream, and reply of DELETE /requests/{id}: the resident that the backend holds now.

    The resident's tokens are ``(prompt + generated)[:prefilled_until]``; on a cancel in prefill, a part of the
    prompt.
    """

    request_id: str
    # "stop", "length", "cancelled", "error"; "discarded": a step failed, of whatever request, and all in its batch is
    # lost; "leaderless": the request that it followed ended too soon.  After the last two it is worth sending again.
    finish: str
    resident: str  # "" where nothing is kept
    generated: bytes  # u32le ids sampled *and* computed: each has rows
    prefilled_until: int  # tokens that have rows
    checkpoints: list[int]  # positions whose state is kept in memory, ascending
    positions: list[int]  # as in Resident
    timings: Timings
    error: str = ""
    error_code: str = ""  # of an invalid request; else "", and `finish` is the code
    first: FirstLogits | None = None  # where a token was computed
    turn: SampledTurn | None = None  # where tools were called


class ErrorBody(msgspec.Struct, kw_only=True):
    """OpenAI's error object."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, kw_only=True):
    error: ErrorBody


def encode(message: object) -> bytes:
    return msgspec.json.encode(message)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Message of type `kind`, strictly typed.  Raises msgspec.ValidationError or DecodeError.  Any thread."""
    try:
        return cast(T, _find_decoder(kind)(data))
    except UnicodeDecodeError as error:  # a kind of its own; what it quotes may be a text that was sent
        raise msgspec.DecodeError(f"it is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise msgspec.DecodeError("it nests too deeply") from None


def convert(value: object, kind: type[T], *, from_attributes: bool = False) -> T:
    """Value of type `kind` from plain values or attributes.  Raises msgspec.ValidationError.  Any thread."""
    _find_decoder(kind)
    return msgspec.convert(value, kind, from_attributes=from_attributes)


def _find_decoder(kind: Any) -> Callable[[Any], Any]:
    if kind not in _decoders:
        with _decoders_lock:  # msgspec (0.22) crashes where two threads meet a struct for the first time at once
            _decoders.setdefault(kind, msgspec.json.Decoder(kind).decode)
    return _decoders[kind]


def parse_error_message(body: bytes) -> str:
    """Message of an error object, or the beginning of any other body."""
    try:
        return decode(body, ErrorReply).error.message
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


def redact_error_message(body: bytes) -> str:
    """Message of an error object without a client's values, for logs."""
    try:
        error = decode(body, ErrorReply).error
    except msgspec.DecodeError:
        return "the reply has no error object"
    return redact(error.message)
