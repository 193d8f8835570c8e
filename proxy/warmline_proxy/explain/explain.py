"""Explanation of a request's start: its record, the cause of the miss, and the present state of the index.

It needs a readable index alone, so it works with and without a proxy.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

import msgspec

from warmline_common.process.redaction import quote_text
from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES, unpack_tokens
from warmline_common.settings.hints import add_home
from warmline_common.storage.home import Home
from warmline_proxy.auth.owners import REMOVED_LABEL, OwnerLabels, describe_owner, read_fingerprint
from warmline_proxy.explain.causes import CAUSES, NEW_TEXT, find_cause, find_secondary_causes
from warmline_proxy.explain.text_diff import diff_texts
from warmline_proxy.explain.waits import WaitReport, report_waits
from warmline_proxy.index.index import IndexReader
from warmline_proxy.planner import COLD, SHARED
from warmline_proxy.store.rows import Divergence, RequestRecord, SegmentRow, SessionRow

LAST = "last"
ID_PREFIX_MIN = 4
RECENT_MAX = 8  # requests that are named where none has the id
WARM_CAUSES = ("warm", NEW_TEXT, "shared")  # all stored tokens were reused
# Requests that `LAST` skips, since there is nothing to explain.
QUIET_CAUSES = (*WARM_CAUSES, "nothing-asked", "not-planned")
_ANSWER_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)(.+)")


class RequestNotFoundError(Exception):
    """Id of none of the last requests, or of several; the message names some."""


class CauseReport(msgspec.Struct, kw_only=True):
    """Cause with its meaning and advice."""

    cause: str  # a name in `causes.CAUSES`
    means: str
    advice: str = ""  # "" where there is nothing to do
    detail: str = ""  # of this request


class DivergencePoint(msgspec.Struct, kw_only=True):
    """First token that differs."""

    token: int
    begins: int  # first token of both windows
    message: int  # number in the prompt, from 1; 0: none, or not known
    message_last: int  # more than `message` where the token is in one of several
    role: str  # "tools" in the tools; "" where that is not known


class DiffSide(msgspec.Struct, kw_only=True):
    """Window of tokens around a difference."""

    tokens: list[int]
    text: str  # "" where no backend was there to detokenize
    differs: list[tuple[int, int]]  # ranges of characters in the text


class StoredState(msgspec.Struct, kw_only=True):
    """Part of a request that is stored now."""

    session: str  # "" where the conversation is not stored
    title: str = ""  # of the conversation, or the client's name for it
    tokens: int  # of the request's prompt
    branch: bool  # whether the branch is stored from which the prompt diverged


class WarmSince(msgspec.Struct, kw_only=True):
    """Warm requests after the explained one."""

    warm: int  # their number, at least 1; each choice of a request counts
    last: str  # id of the last one
    at: float  # its arrival, Unix seconds


class ExplainReply(msgspec.Struct, kw_only=True):
    """Answer of GET /warmline/explain, printed by `cachectl explain --json`."""

    request: RequestRecord  # without its `parting`, which `where`, `known` and `prompt` show
    verdict: CauseReport
    besides: list[CauseReport]  # secondary causes
    where: DivergencePoint | None = None  # None where the prompt doesn't diverge
    known: DiffSide | None = None  # stored or resident tokens there
    prompt: DiffSide | None = None
    now: StoredState
    waits: list[WaitReport]  # before and in its prefill, the longest first
    since: WarmSince | None = None  # None where the query was an id, or no request was warm since


def find_record(records: Sequence[RequestRecord], query: str) -> RequestRecord:
    """Find a request by id, a beginning of it, or its answer's id; "last": the last one with something to explain.

    `records`: newest first.  Raises RequestNotFoundError.
    """
    if query == LAST and not records:
        raise RequestNotFoundError("no request is remembered: none was answered yet, or a purge has forgotten them")
    if query == LAST:
        return next((each for each in records if _find_cause(each) not in QUIET_CAUSES), records[0])
    id_prefix = match[1] if (match := _ANSWER_ID.fullmatch(query)) else query
    for name in (query, id_prefix):
        if exact := next((each for each in records if each.id == name), None):
            return exact
    found = [each for each in records if each.id.startswith(id_prefix)] if len(id_prefix) >= ID_PREFIX_MIN else []
    requests = {each.id.partition(".")[0] for each in found}  # choices of a request count once
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
    """Find a request as `find_record` does, with the later warm ones for "last".  Raises RequestNotFoundError."""
    record = find_record(records, query)
    newer = itertools.takewhile(lambda each: each is not record, records) if query == LAST else ()
    warm = [each for each in newer if _find_cause(each) in WARM_CAUSES and not _is_other_choice(each, record)]
    return record, WarmSince(warm=len(warm), last=warm[0].id, at=warm[0].at) if warm else None


def _is_other_choice(choice: RequestRecord, first: RequestRecord) -> bool:
    return choice.source == SHARED and choice.id.rpartition(".")[0] == first.id.rpartition(".")[0] != ""


def _format_ids(records: Sequence[RequestRecord]) -> str:
    return ", ".join(each.id for each in records[:RECENT_MAX])


def explain(
    reader: IndexReader, record: RequestRecord, since: WarmSince | None = None, owner_labels: OwnerLabels | None = None
) -> ExplainReply:
    """Explain a request.  Blocks; raises IndexStoreError."""
    owner_labels = owner_labels or OwnerLabels()
    divergence = record.parting
    cause, detail = _find_cause(record), ""
    if cause == "first-request":
        cause, detail = _find_elsewhere(reader, record, owner_labels)
    point = stored = prompt = None
    if divergence:
        point = make_point(divergence.at, divergence.begins, divergence)
        old, new = unpack_tokens(divergence.stored), unpack_tokens(divergence.prompt)
        stored, prompt = make_sides(old, divergence.stored_text, new, divergence.prompt_text)
    return ExplainReply(
        request=msgspec.structs.replace(record, parting=None, key=owner_labels.format_key_name(record)),
        verdict=_make_report(reader.home, cause, detail),
        besides=[_make_report(reader.home, name) for name in find_secondary_causes(record.why_not_warmer, cause)],
        where=point,
        known=stored,
        prompt=prompt,
        now=_read_stored_state(reader, record),
        waits=report_waits(record.waits),
        since=since,
    )


def add_texts(record: RequestRecord, texts: Sequence[str]) -> RequestRecord:
    """Add the texts of a record's divergence, the stored one first, and find its cause again."""
    assert record.parting is not None
    stored_text, prompt_text = texts
    divergence = msgspec.structs.replace(record.parting, stored_text=stored_text, prompt_text=prompt_text)
    divergence.cause = find_cause(record.why_not_warmer, divergence)
    return msgspec.structs.replace(record, parting=divergence)


def find_fingerprint(reader: IndexReader, root: bytes) -> str:
    """Read the fingerprint of the model that wrote the segments under this root; "" where no file has it."""
    return read_fingerprint(reader.home, (row for row in reader.segments() if row.root == root))


def _find_cause(record: RequestRecord) -> str:
    divergence = record.parting
    if record.source == COLD and not (record.why_not_warmer or record.expected_ttft_s):
        return "not-planned"
    return divergence.cause if divergence and divergence.cause else find_cause(record.why_not_warmer, divergence)


def _make_report(home: Home, cause: str, detail: str = "") -> CauseReport:
    entry = CAUSES.get(cause, CAUSES["unknown"])
    return CauseReport(cause=cause, means=entry.meaning, advice=add_home(entry.advice, home.root), detail=detail)


def make_point(token: int, begins: int, divergence: Divergence | None) -> DivergencePoint:
    """Name the message of a token, where a divergence there is known."""
    message, last, role = (divergence.message, divergence.message_last, divergence.role) if divergence else (0, 0, "")
    return DivergencePoint(token=token, begins=begins, message=message, message_last=last, role=role)


def make_sides(old: list[int], old_text: str, new: list[int], new_text: str) -> tuple[DiffSide, DiffSide]:
    """Mark the differences of two windows."""
    old_ranges, new_ranges = diff_texts(old_text, new_text)
    old_side = DiffSide(tokens=old, text=old_text, differs=old_ranges)
    return old_side, DiffSide(tokens=new, text=new_text, differs=new_ranges)


def _read_stored_state(reader: IndexReader, record: RequestRecord) -> StoredState:
    session = _find_session(reader, record)
    branch = _is_branch_stored(reader, record, session)
    tokens = min(session.tokens, record.prompt_tokens) if session else 0
    session_id, title = (session.id, session.label) if session else ("", "")
    return StoredState(session=session_id, title=title, tokens=tokens, branch=branch)


def _is_branch_stored(reader: IndexReader, record: RequestRecord, session: SessionRow | None) -> bool:
    """Say whether the branch from which the prompt diverged is on disk, in the recorded segment or a later one."""
    if (divergence := record.parting) is None:
        return False
    if divergence.segment and reader.segment(divergence.segment) is not None:
        return True
    head = _read_tokens(reader, session, divergence.at)
    if len(head) < divergence.at * TOKEN_BYTES:
        return False
    branch = head + divergence.stored[(divergence.at - divergence.begins) * TOKEN_BYTES :]
    count = len(branch) // TOKEN_BYTES
    return reader.match_prefix(record.root, branch, count).tokens == count


def _find_elsewhere(reader: IndexReader, record: RequestRecord, owner_labels: OwnerLabels) -> tuple[str, str]:
    """Look under other roots for the tokens of a request that found nothing under its own: (cause, detail)."""
    rows = reader.segments()
    mine = [row for row in rows if row.root == record.root]
    others = [row for row in rows if row.root != record.root and row.created < record.at]
    if not others or not (own := read_fingerprint(reader.home, mine)):
        return "first-request", ""
    tokens = _read_tokens(reader, _find_session(reader, record), record.prompt_tokens)
    return next(_iter_other_roots(reader, own, mine[0].model, others, tokens, owner_labels), ("first-request", ""))


def _iter_other_roots(
    reader: IndexReader, own: str, model: str, others: Sequence[SegmentRow], tokens: bytes, owner_labels: OwnerLabels
) -> Iterator[tuple[str, str]]:
    """Yield (cause, detail) for other roots, those with the same tokens first."""
    roots = dict.fromkeys(row.root for row in others)
    fingerprints = {root: read_fingerprint(reader.home, (row for row in others if row.root == root)) for root in roots}
    same = {root: reader.match_prefix(root, tokens, len(tokens) // TOKEN_BYTES).tokens for root in roots}
    enough = min(BLOCK_TOKENS, max(1, len(tokens) // TOKEN_BYTES))
    for root in sorted(roots, key=lambda each: -same[each]):
        is_here = same[root] >= enough
        if is_here and fingerprints[root] == own:
            label = owner_labels.find_label(root)
            cause = "removed-key" if label == REMOVED_LABEL else "other-key"
            yield cause, f"{same[root]} of its tokens are stored for {describe_owner(label)}"
        names = {row.model for row in others if row.root == root}
        if fingerprints[root] not in ("", own) and (is_here or model in names):
            was = f"fingerprint {fingerprints[root][:12]}, now {own[:12]}"
            yield "other-model", f"everything stored for {model} before belongs to another fingerprint ({was})"


def _find_session(reader: IndexReader, record: RequestRecord) -> SessionRow | None:
    return reader.session(record.session) if record.session else None


def _read_tokens(reader: IndexReader, session: SessionRow | None, count: int) -> bytes:
    """Read the first `count` stored tokens of a conversation, packed."""
    return reader.path_tokens(session.leaf)[: count * TOKEN_BYTES] if session else b""
