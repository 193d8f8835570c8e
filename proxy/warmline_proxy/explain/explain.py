"""Why a request was no warmer, told whole: put together from its record and from what is stored now.

Needs nothing but an index that can be read, so it works whether a proxy runs or not.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

import msgspec

from warmline_common.process.redaction import quote_text
from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES, unpack_tokens
from warmline_proxy.auth.owners import REMOVED_LABEL, OwnerLabels, describe_owner, read_fingerprint
from warmline_proxy.explain.causes import CAUSES, find_cause, find_secondary_causes
from warmline_proxy.explain.text_diff import diff_texts
from warmline_proxy.index.index import IndexReader
from warmline_proxy.planner import COLD, SHARED
from warmline_proxy.store.rows import Divergence, RequestRecord, SegmentRow, SessionRow

LAST = "last"
ID_PREFIX_MIN = 4
RECENT_MAX = 8  # requests that are named where the one that is asked for is not known
WARM_CAUSES = ("warm", "new-text", "shared")  # causes of requests that reused all there was
# What is asked about last: of these requests there is nothing to explain.
QUIET_CAUSES = (*WARM_CAUSES, "nothing-asked", "not-planned")
_ANSWER_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)(.+)")


class RequestNotFoundError(Exception):
    """None of the last requests is called that, or several are; the message names some."""


class CauseReport(msgspec.Struct, kw_only=True):
    cause: str  # a name in `causes.CAUSES`
    means: str
    advice: str = ""  # "" where there is nothing to do
    detail: str = ""  # of this very request


class DivergencePoint(msgspec.Struct, kw_only=True):
    """The first token that differs."""

    token: int
    begins: int  # the token that both sides begin at
    message: int  # of the prompt, from 1; 0 where that is not known, or none
    message_last: int  # more than `message` where it is one of several
    role: str  # "tools" in the tools; "" where that is not known


class DiffSide(msgspec.Struct, kw_only=True):
    tokens: list[int]
    text: str  # "" where nobody could say
    differs: list[tuple[int, int]]  # ranges of characters in the text


class StoredState(msgspec.Struct, kw_only=True):
    session: str  # "" where the conversation is no longer stored, or never was
    tokens: int  # of the request's prompt
    branch: bool  # whether what it differed from is


class WarmSince(msgspec.Struct, kw_only=True):
    """The requests after the one that is told of, which were warm: it is not the last one."""

    warm: int  # how many, at least 1; each choice of a request is one
    last: str  # the id of the last one of these
    at: float  # when that one came, Unix seconds


class ExplainReply(msgspec.Struct, kw_only=True):
    """GET /warmline/explain of the proxy, and what `cachectl explain --json` prints."""

    request: RequestRecord  # its parting is told by the others
    verdict: CauseReport
    besides: list[CauseReport]  # what else kept its start from being warmer
    where: DivergencePoint | None = None  # None where it does not differ from what was known
    known: DiffSide | None = None  # what was known there
    prompt: DiffSide | None = None  # what came instead
    now: StoredState
    since: WarmSince | None = None  # None where this very request was asked about, or none was warm since


def find_record(records: Sequence[RequestRecord], query: str) -> RequestRecord:
    """Of the last requests, newest first: by id, its beginning, or the id of its answer; "last" is the last one that
    there is something to explain about.  Raises UnknownRequest.
    """
    if query == LAST:
        return _find_last(records)
    id_prefix = match[1] if (match := _ANSWER_ID.fullmatch(query)) else query
    for name in (query, id_prefix):
        if exact := next((each for each in records if each.id == name), None):
            return exact
    found = [each for each in records if each.id.startswith(id_prefix)] if len(id_prefix) >= ID_PREFIX_MIN else []
    requests = {each.id.partition(".")[0] for each in found}  # choices of one are one
    if len(requests) == 1:
        return found[-1]
    if found:
        raise RequestNotFoundError(f"{quote_text(query[:80])} may be any of {_format_ids(found)}")
    short = f" (a beginning has {ID_PREFIX_MIN} characters at least)" if len(id_prefix) < ID_PREFIX_MIN else ""
    recent = f"; the last ones are {_format_ids(records)}" if records else ""
    raise RequestNotFoundError(
        f"none of the last {len(records)} requests is called {quote_text(query[:80])}{short}{recent}"
    )


def find_record_with_since(records: Sequence[RequestRecord], query: str) -> tuple[RequestRecord, WarmSince | None]:
    """The same, and what came after it where the last one was asked for.  Raises UnknownRequest."""
    record = find_record(records, query)
    return record, _find_warm_since(records, record) if query == LAST else None


def _find_warm_since(records: Sequence[RequestRecord], record: RequestRecord) -> WarmSince | None:
    """But for the choices of one request that followed its first."""
    newer = itertools.takewhile(lambda each: each is not record, records)
    warm = [each for each in newer if _find_cause(each) in WARM_CAUSES and not _is_follower(each, record)]
    return WarmSince(warm=len(warm), last=warm[0].id, at=warm[0].at) if warm else None


def _is_follower(choice: RequestRecord, first: RequestRecord) -> bool:
    return choice.source == SHARED and choice.id.rpartition(".")[0] == first.id.rpartition(".")[0] != ""


def _find_last(records: Sequence[RequestRecord]) -> RequestRecord:
    if not records:
        raise RequestNotFoundError("no request is remembered: none was answered yet, or a purge has forgotten them")
    return next((each for each in records if _find_cause(each) not in QUIET_CAUSES), records[0])


def _format_ids(records: Sequence[RequestRecord]) -> str:
    return ", ".join(each.id for each in records[:RECENT_MAX])


def explain(
    reader: IndexReader, record: RequestRecord, since: WarmSince | None = None, owner_labels: OwnerLabels | None = None
) -> ExplainReply:
    """`known`: whose what is stored is.  Blocks; raises IndexFailure."""
    owner_labels = owner_labels or OwnerLabels()
    divergence = record.parting
    cause, detail = _find_cause(record), ""
    if cause == "first-request":
        cause, detail = _find_elsewhere(reader, record, owner_labels)
    stored, prompt = _make_sides(divergence) if divergence else (None, None)
    return ExplainReply(
        request=msgspec.structs.replace(record, parting=None, key=owner_labels.format_key_name(record)),
        verdict=_make_report(cause, detail),
        besides=[_make_report(name) for name in find_secondary_causes(record.why_not_warmer, cause)],
        where=_make_point(divergence) if divergence else None,
        known=stored,
        prompt=prompt,
        now=_read_stored_state(reader, record),
        since=since,
    )


def add_texts(record: RequestRecord, texts: Sequence[str]) -> RequestRecord:
    """A record whose parting's tokens say these texts, the stored one first: its cause may be clearer now."""
    assert record.parting is not None
    stored_text, prompt_text = texts
    divergence = msgspec.structs.replace(record.parting, stored_text=stored_text, prompt_text=prompt_text)
    divergence.cause = find_cause(record.why_not_warmer, divergence)
    return msgspec.structs.replace(record, parting=divergence)


def find_fingerprint(reader: IndexReader, root: bytes) -> str:
    """Of the model that wrote what is stored under this root, as its files say; "" where none does."""
    return read_fingerprint(reader.home, (row for row in reader.segments() if row.root == root))


def _find_cause(record: RequestRecord) -> str:
    divergence = record.parting
    if record.source == COLD and not (record.why_not_warmer or record.expected_ttft_s):
        return "not-planned"
    return divergence.cause if divergence and divergence.cause else find_cause(record.why_not_warmer, divergence)


def _make_report(cause: str, detail: str = "") -> CauseReport:
    entry = CAUSES.get(cause, CAUSES["unknown"])
    return CauseReport(cause=cause, means=entry.meaning, advice=entry.advice, detail=detail)


def _make_point(divergence: Divergence) -> DivergencePoint:
    return DivergencePoint(
        token=divergence.at,
        begins=divergence.begins,
        message=divergence.message,
        message_last=divergence.message_last,
        role=divergence.role,
    )


def _make_sides(divergence: Divergence) -> tuple[DiffSide, DiffSide]:
    known, prompt = diff_texts(divergence.stored_text, divergence.prompt_text)
    return (
        DiffSide(tokens=unpack_tokens(divergence.stored), text=divergence.stored_text, differs=known),
        DiffSide(tokens=unpack_tokens(divergence.prompt), text=divergence.prompt_text, differs=prompt),
    )


def _read_stored_state(reader: IndexReader, record: RequestRecord) -> StoredState:
    session = reader.session(record.session) if record.session else None
    return StoredState(
        session=session.id if session else "",
        tokens=min(session.tokens, record.prompt_tokens) if session else 0,
        branch=_is_branch_stored(reader, record, session),
    )


def _is_branch_stored(reader: IndexReader, record: RequestRecord, session: SessionRow | None) -> bool:
    """Whether what its prompt parted from is on disk: in the segment of then, or wherever else, since small ones are
    written anew as a conversation grows, and what was in memory is saved.
    """
    divergence = record.parting
    if divergence is None:
        return False
    if divergence.segment and reader.segment(divergence.segment) is not None:
        return True
    head = reader.path_tokens(session.leaf)[: divergence.at * TOKEN_BYTES] if session else b""
    if len(head) < divergence.at * TOKEN_BYTES:
        return False
    known = head + divergence.stored[(divergence.at - divergence.begins) * TOKEN_BYTES :]
    count = len(known) // TOKEN_BYTES
    return reader.match_prefix(record.root, known, count).tokens == count


def _find_elsewhere(reader: IndexReader, record: RequestRecord, owner_labels: OwnerLabels) -> tuple[str, str]:
    """Nothing was stored under its root: whether there was something under another one, and whose that is."""
    rows = reader.segments()
    mine = [row for row in rows if row.root == record.root]
    others = [row for row in rows if row.root != record.root and row.created < record.at]
    if not others or not (own := read_fingerprint(reader.home, mine)):
        return "first-request", ""
    tokens = _read_prompt(reader, record)
    return next(_iter_other_roots(reader, own, mine[0].model, others, tokens, owner_labels), ("first-request", ""))


def _iter_other_roots(
    reader: IndexReader, own: str, model: str, others: Sequence[SegmentRow], tokens: bytes, owner_labels: OwnerLabels
) -> Iterator[tuple[str, str]]:
    """The same tokens first: they leave no doubt."""
    roots = dict.fromkeys(row.root for row in others)
    prints = {root: read_fingerprint(reader.home, (row for row in others if row.root == root)) for root in roots}
    same = {root: reader.match_prefix(root, tokens, len(tokens) // TOKEN_BYTES).tokens for root in roots}
    enough = min(BLOCK_TOKENS, max(1, len(tokens) // TOKEN_BYTES))
    for root in sorted(roots, key=lambda each: -same[each]):
        is_here = same[root] >= enough
        if is_here and prints[root] == own:
            word = owner_labels.find_label(root)
            cause = "removed-key" if word == REMOVED_LABEL else "other-key"
            yield cause, f"{same[root]} of its tokens are stored for {describe_owner(word)}"
        names = {row.model for row in others if row.root == root}
        if prints[root] and prints[root] != own and (is_here or model in names):
            was = f"fingerprint {prints[root][:12]}, now {own[:12]}"
            yield "other-model", f"everything stored for {model} before belongs to another fingerprint ({was})"


def _read_prompt(reader: IndexReader, record: RequestRecord) -> bytes:
    """As much of it as is stored now."""
    session = reader.session(record.session) if record.session else None
    return reader.path_tokens(session.leaf)[: record.prompt_tokens * TOKEN_BYTES] if session else b""
