"""Why a request was no warmer, told whole: put together from its record and from what is stored now.

Needs nothing but an index that can be read, so it works whether a proxy runs or not.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

import msgspec

from warmline_common.process.redaction import quoted
from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES, unpack_tokens
from warmline_proxy.auth.owners import REMOVED, Whose, fingerprint_in, in_a_sentence
from warmline_proxy.explain.causes import CAUSES, cause_of, causes_besides
from warmline_proxy.explain.text_diff import differences
from warmline_proxy.index.index import IndexReader
from warmline_proxy.planner import COLD, SHARED
from warmline_proxy.store.rows import Parting, RequestRecord, SegmentRow, SessionRow

LAST = "last"
ID_PREFIX_MIN = 4
RECENT = 8  # requests that are named where the one that is asked for is not known
WARM = ("warm", "new-text", "shared")  # causes of requests that reused all there was
# What is asked about last: of these requests there is nothing to explain.
QUIET = (*WARM, "nothing-asked", "not-planned")
_ANSWER_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)(.+)")


class UnknownRequest(Exception):
    """None of the last requests is called that, or several are; the message names some."""


class Verdict(msgspec.Struct, kw_only=True):
    cause: str  # a name in `causes.CAUSES`
    means: str
    advice: str = ""  # "" where there is nothing to do
    detail: str = ""  # of this very request


class Where(msgspec.Struct, kw_only=True):
    """The first token that differs."""

    token: int
    begins: int  # the token that both sides begin at
    message: int  # of the prompt, from 1; 0 where that is not known, or none
    message_last: int  # more than `message` where it is one of several
    role: str  # "tools" in the tools; "" where that is not known


class Side(msgspec.Struct, kw_only=True):
    tokens: list[int]
    text: str  # "" where nobody could say
    differs: list[tuple[int, int]]  # ranges of characters in the text


class StoredNow(msgspec.Struct, kw_only=True):
    session: str  # "" where the conversation is no longer stored, or never was
    tokens: int  # of the request's prompt
    branch: bool  # whether what it differed from is


class Since(msgspec.Struct, kw_only=True):
    """The requests after the one that is told of, which were warm: it is not the last one."""

    warm: int  # how many, at least 1; each choice of a request is one
    last: str  # the id of the last one of these
    at: float  # when that one came, Unix seconds


class ExplainReply(msgspec.Struct, kw_only=True):
    """GET /warmline/explain of the proxy, and what `cachectl explain --json` prints."""

    request: RequestRecord  # its parting is told by the others
    verdict: Verdict
    besides: list[Verdict]  # what else kept its start from being warmer
    where: Where | None = None  # None where it does not differ from what was known
    known: Side | None = None  # what was known there
    prompt: Side | None = None  # what came instead
    now: StoredNow
    since: Since | None = None  # None where this very request was asked about, or none was warm since


def find(records: Sequence[RequestRecord], asked: str) -> RequestRecord:
    """Of the last requests, newest first: by id, its beginning, or the id of its answer; "last" is the last one that
    there is something to explain about.  Raises UnknownRequest.
    """
    if asked == LAST:
        return _last(records)
    meant = match[1] if (match := _ANSWER_ID.fullmatch(asked)) else asked
    for name in (asked, meant):
        if exact := next((each for each in records if each.id == name), None):
            return exact
    found = [each for each in records if each.id.startswith(meant)] if len(meant) >= ID_PREFIX_MIN else []
    requests = {each.id.partition(".")[0] for each in found}  # choices of one are one
    if len(requests) == 1:
        return found[-1]
    if found:
        raise UnknownRequest(f"{quoted(asked[:80])} may be any of {_named(found)}")
    short = f" (a beginning has {ID_PREFIX_MIN} characters at least)" if len(meant) < ID_PREFIX_MIN else ""
    recent = f"; the last ones are {_named(records)}" if records else ""
    raise UnknownRequest(f"none of the last {len(records)} requests is called {quoted(asked[:80])}{short}{recent}")


def find_with_since(records: Sequence[RequestRecord], asked: str) -> tuple[RequestRecord, Since | None]:
    """The same, and what came after it where the last one was asked for.  Raises UnknownRequest."""
    record = find(records, asked)
    return record, _warm_since(records, record) if asked == LAST else None


def _warm_since(records: Sequence[RequestRecord], record: RequestRecord) -> Since | None:
    """But for the choices of one request that followed its first."""
    newer = itertools.takewhile(lambda each: each is not record, records)
    warm = [each for each in newer if _cause(each) in WARM and not _follows(each, record)]
    return Since(warm=len(warm), last=warm[0].id, at=warm[0].at) if warm else None


def _follows(choice: RequestRecord, first: RequestRecord) -> bool:
    return choice.source == SHARED and choice.id.rpartition(".")[0] == first.id.rpartition(".")[0] != ""


def _last(records: Sequence[RequestRecord]) -> RequestRecord:
    if not records:
        raise UnknownRequest("no request is remembered: none was answered yet, or a purge has forgotten them")
    return next((each for each in records if _cause(each) not in QUIET), records[0])


def _named(records: Sequence[RequestRecord]) -> str:
    return ", ".join(each.id for each in records[:RECENT])


def explain(
    reader: IndexReader, record: RequestRecord, since: Since | None = None, known: Whose | None = None
) -> ExplainReply:
    """`known`: whose what is stored is.  Blocks; raises IndexFailure."""
    known = known or Whose()
    seen = record.parting
    cause, detail = _cause(record), ""
    if cause == "first-request":
        cause, detail = _elsewhere(reader, record, known)
    stored, prompt = _sides(seen) if seen else (None, None)
    return ExplainReply(
        request=msgspec.structs.replace(record, parting=None, key=known.shown(record)),
        verdict=_verdict(cause, detail),
        besides=[_verdict(name) for name in causes_besides(record.why_not_warmer, cause)],
        where=_where(seen) if seen else None,
        known=stored,
        prompt=prompt,
        now=_now(reader, record),
        since=since,
    )


def with_texts(record: RequestRecord, texts: Sequence[str]) -> RequestRecord:
    """A record whose parting's tokens say these texts, the stored one first: its cause may be clearer now."""
    assert record.parting is not None
    stored_text, prompt_text = texts
    seen = msgspec.structs.replace(record.parting, stored_text=stored_text, prompt_text=prompt_text)
    seen.cause = cause_of(record.why_not_warmer, seen)
    return msgspec.structs.replace(record, parting=seen)


def fingerprint_of(reader: IndexReader, root: bytes) -> str:
    """Of the model that wrote what is stored under this root, as its files say; "" where none does."""
    return fingerprint_in(reader.home, (row for row in reader.segments() if row.root == root))


def _cause(record: RequestRecord) -> str:
    seen = record.parting
    if record.source == COLD and not (record.why_not_warmer or record.expected_ttft_s):
        return "not-planned"
    return seen.cause if seen and seen.cause else cause_of(record.why_not_warmer, seen)


def _verdict(cause: str, detail: str = "") -> Verdict:
    known = CAUSES.get(cause, CAUSES["unknown"])
    return Verdict(cause=cause, means=known.means, advice=known.advice, detail=detail)


def _where(seen: Parting) -> Where:
    return Where(
        token=seen.at, begins=seen.begins, message=seen.message, message_last=seen.message_last, role=seen.role
    )


def _sides(seen: Parting) -> tuple[Side, Side]:
    known, prompt = differences(seen.stored_text, seen.prompt_text)
    return (
        Side(tokens=unpack_tokens(seen.stored), text=seen.stored_text, differs=known),
        Side(tokens=unpack_tokens(seen.prompt), text=seen.prompt_text, differs=prompt),
    )


def _now(reader: IndexReader, record: RequestRecord) -> StoredNow:
    session = reader.session(record.session) if record.session else None
    return StoredNow(
        session=session.id if session else "",
        tokens=min(session.tokens, record.prompt_tokens) if session else 0,
        branch=_is_stored(reader, record, session),
    )


def _is_stored(reader: IndexReader, record: RequestRecord, session: SessionRow | None) -> bool:
    """Whether what its prompt parted from is on disk: in the segment of then, or wherever else, since small ones are
    written anew as a conversation grows, and what was in memory is saved.
    """
    seen = record.parting
    if seen is None:
        return False
    if seen.segment and reader.segment(seen.segment) is not None:
        return True
    head = reader.stored_tokens(session.leaf)[: seen.at * TOKEN_BYTES] if session else b""
    if len(head) < seen.at * TOKEN_BYTES:
        return False
    known = head + seen.stored[(seen.at - seen.begins) * TOKEN_BYTES :]
    count = len(known) // TOKEN_BYTES
    return reader.match(record.root, known, count).tokens == count


def _elsewhere(reader: IndexReader, record: RequestRecord, known: Whose) -> tuple[str, str]:
    """Nothing was stored under its root: whether there was something under another one, and whose that is."""
    rows = reader.segments()
    mine = [row for row in rows if row.root == record.root]
    others = [row for row in rows if row.root != record.root and row.created < record.at]
    if not others or not (own := fingerprint_in(reader.home, mine)):
        return "first-request", ""
    tokens = _prompt(reader, record)
    return next(_told(reader, own, mine[0].model, others, tokens, known), ("first-request", ""))


def _told(
    reader: IndexReader, own: str, model: str, others: Sequence[SegmentRow], tokens: bytes, known: Whose
) -> Iterator[tuple[str, str]]:
    """The same tokens first: they leave no doubt."""
    roots = dict.fromkeys(row.root for row in others)
    prints = {root: fingerprint_in(reader.home, (row for row in others if row.root == root)) for root in roots}
    same = {root: reader.match(root, tokens, len(tokens) // TOKEN_BYTES).tokens for root in roots}
    enough = min(BLOCK_TOKENS, max(1, len(tokens) // TOKEN_BYTES))
    for root in sorted(roots, key=lambda each: -same[each]):
        is_here = same[root] >= enough
        if is_here and prints[root] == own:
            word = known.word(root)
            cause = "removed-key" if word == REMOVED else "other-key"
            yield cause, f"{same[root]} of its tokens are stored for {in_a_sentence(word)}"
        names = {row.model for row in others if row.root == root}
        if prints[root] and prints[root] != own and (is_here or model in names):
            was = f"fingerprint {prints[root][:12]}, now {own[:12]}"
            yield "other-model", f"everything stored for {model} before belongs to another fingerprint ({was})"


def _prompt(reader: IndexReader, record: RequestRecord) -> bytes:
    """As much of it as is stored now."""
    session = reader.session(record.session) if record.session else None
    return reader.stored_tokens(session.leaf)[: record.prompt_tokens * TOKEN_BYTES] if session else b""
