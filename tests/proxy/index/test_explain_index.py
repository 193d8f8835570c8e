"""Explanations from an index alone, long after the request."""

from collections.abc import Iterable

import msgspec
import pytest

from support.index.indexes import (
    LAYOUT,
    MODEL,
    ROOT,
    count_file_bytes,
    count_matched,
    find_end_reason,
    save,
    write_plan,
)
from warmline_common.protocol.tokens import namespace, pack_tokens, unpack_tokens
from warmline_proxy.explain.causes import find_cause
from warmline_proxy.explain.diff import compare_conversations, load_conversation
from warmline_proxy.explain.explain import (
    LAST,
    RequestNotFoundError,
    WarmSince,
    add_texts,
    explain,
    find_fingerprint,
    find_record,
    find_record_with_since,
)
from warmline_proxy.index import lookup
from warmline_proxy.index.index import Index
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import DIVERGENCE_TOKENS_AFTER, Divergence, PurgeRequest, RequestRecord, SessionUpdate
from warmline_proxy.store.tables import Tables

PROMPT = list(range(1000, 1200))
OTHER_KEY = namespace("model-a", "tenant")
OTHER_MODEL = namespace("model-b")
FINGERPRINTS = {ROOT: "model-a", OTHER_KEY: "model-a", OTHER_MODEL: "model-b"}


def make_record(request: str = "aaaa1111", **fields: object) -> RequestRecord:
    values = {"at": 2e9, "endpoint": "chat", "client_model": "m", "outcome": "ok", "source": "cold", "root": ROOT}
    return RequestRecord(id=request, **{**values, **fields})  # type: ignore[arg-type]


def make_divergence(at: int = 40, **fields: object) -> Divergence:
    values = {"begins": at - 8, "stored": pack_tokens([1] * 8 + [2]), "prompt": pack_tokens([1] * 8 + [3])}
    return Divergence(at=at, **{**values, **fields})  # type: ignore[arg-type]


def save_under(index: Index, root: bytes, ids: Iterable[int]) -> str:
    """The session's id."""
    plan = index.begin_save(SaveIntent(root, MODEL, pack_tokens(ids), LAYOUT))
    assert plan is not None
    reply = write_plan(index.home, plan, fingerprint=FINGERPRINTS[root])
    return index.commit_save(plan, reply, prefill_s=1.0, session=SessionUpdate(turn_end=0)).session


def test_match_has_stored_tokens_at_divergence(index: Index) -> None:
    save(index, PROMPT)
    save(index, [*PROMPT[:150], *range(50)])
    match = index.match_prefix(ROOT, pack_tokens([*PROMPT[:150], 7, 7, 7]), 153)
    assert (match.tokens, match.is_divergent) == (150, True)
    assert unpack_tokens(match.divergent_tokens) == list(range(50))  # the youngest branch
    row = index.segment(match.divergent_segment)
    assert row is not None and row.start == 150
    assert unpack_tokens(index.tokens_from(row.parent, 140, 70))[:10] == PROMPT[140:150]
    same = index.match_prefix(ROOT, pack_tokens([*PROMPT, 5]), 201)
    assert (same.tokens, same.divergent_tokens, same.divergent_segment) == (200, b"", "")


def test_divergence_in_long_prompt_reads_once_more(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the prompt's length: planning waits for it."""
    for end in range(500, 2500, 500):
        save(index, range(end), may_replace=False)
    reads: list[str] = []
    tokens = Tables.tokens
    monkeypatch.setattr(Tables, "tokens", lambda tables, row: reads.append(row) or tokens(tables, row))
    prompt = pack_tokens([*range(1700), 1, 2])
    match = index.match_prefix(ROOT, prompt, 1702)
    assert unpack_tokens(match.divergent_tokens) == list(range(1700, 1700 + DIVERGENCE_TOKENS_AFTER))
    count = len(reads)
    monkeypatch.setattr(lookup, "_read_diverging_tokens", lambda *_: ("", b""))
    reads.clear()
    assert index.match_prefix(ROOT, prompt, 1702).divergent_tokens == b""
    assert len(reads) == count - 1


def test_evicted_prefix_is_reported(index: Index) -> None:
    save(index, PROMPT)
    index.free_bytes(count_file_bytes(index.home))
    assert count_matched(index, PROMPT) == 0
    assert find_cause(find_end_reason(index, PROMPT), None) == "evicted"


@pytest.mark.parametrize("tokens", [150, 37], ids=["blocks", "less than a block"])
@pytest.mark.parametrize(("root", "cause"), [(OTHER_KEY, "other-key"), (OTHER_MODEL, "other-model")])
def test_first_request_of_namespace_reports_others(index: Index, root: bytes, cause: str, tokens: int) -> None:
    save_under(index, root, PROMPT)
    session = save_under(index, ROOT, PROMPT)
    record = make_record(why_not_warmer="nothing stored", prompt_tokens=tokens, session=session)
    reply = explain(index, record)
    assert reply.verdict.cause == cause
    details = {"other-key": f"{tokens} of its tokens", "other-model": "everything stored for model-a before"}
    assert details[cause] in reply.verdict.detail
    assert (reply.now.session, reply.now.tokens) == (session, tokens)
    earlier = msgspec.structs.replace(record, at=1.0)  # nothing was there then
    assert explain(index, earlier).verdict.cause == "first-request"
    assert find_fingerprint(index, root) == FINGERPRINTS[root]


def test_unrelated_prompt_is_first_request(index: Index) -> None:
    save_under(index, OTHER_KEY, range(5000, 5200))
    session = save_under(index, ROOT, PROMPT)
    reply = explain(index, make_record(why_not_warmer="nothing stored", prompt_tokens=150, session=session))
    assert (reply.verdict.cause, reply.where, reply.known) == ("first-request", None, None)


@pytest.mark.parametrize("kept", [True, False])
def test_diverged_conversation_is_found_after_moves(index: Index, kept: bool) -> None:
    """It was in memory then, or in a segment that was written anew since."""
    if kept:
        save(index, PROMPT)
    session = save(index, [*PROMPT[:150], *range(50)]).session
    seen = make_divergence(
        at=150,
        stored=pack_tokens(PROMPT[142:190]),
        prompt=pack_tokens([*PROMPT[142:150], *range(40)]),
        segment="0" * 32,
    )
    reply = explain(index, make_record(why_not_warmer="differs", prompt_tokens=190, session=session, parting=seen))
    assert (reply.now.branch, reply.now.tokens) == (kept, 190)


def test_divergence_has_location_and_difference(index: Index) -> None:
    session = save(index, PROMPT).session
    leaf = index.sessions()[0].leaf
    seen = make_divergence(message=2, message_last=2, role="user", messages=5, segment=leaf)
    record = make_record(why_not_warmer="differs from what is stored at token 40", parting=seen, session=session)
    reply = explain(index, add_texts(record, ["fix a.py now", "fix b.py now"]))
    assert reply.verdict.cause == "message-edited" and reply.request.parting is None
    assert reply.where is not None and (reply.where.token, reply.where.message, reply.where.role) == (40, 2, "user")
    assert reply.known is not None and reply.known.differs == [(4, 5)] and reply.known.tokens == [1] * 8 + [2]
    assert reply.now.branch
    index.make_room(0)
    assert not explain(index, msgspec.structs.replace(record, parting=make_divergence())).now.branch


def test_refused_request_is_not_called_warm(index: Index) -> None:
    refused = make_record("cccc0000", outcome="error", error="400: 'n' must be an integer")
    assert explain(index, refused).verdict.cause == "not-planned"
    missed = make_record("dddd0000", why_not_warmer="nothing stored")
    assert find_record([refused, missed], LAST) is missed
    warm = make_record("eeee0000", source="resident", expected_ttft_s=0.1)
    shortest = make_record("ffff0000", expected_ttft_s=0.1)  # one token, which has to be computed
    assert {explain(index, each).verdict.cause for each in (warm, shortest)} == {"warm"}


def test_request_is_found_by_any_id(index: Index) -> None:
    warm = make_record("bbbb2222", why_not_warmer="")
    records = [
        warm,
        make_record("aaaa1111.1"),
        make_record("aaaa1111.0"),
        make_record("aaaa3333", why_not_warmer="nothing stored"),
    ]
    records[1].why_not_warmer = records[2].why_not_warmer = "stored up to token 7"
    assert find_record(records, LAST).id == "aaaa3333"
    assert find_record(records[:1], LAST).id == "bbbb2222"
    assert (
        find_record(records, "bbbb").id
        == find_record(records, "chatcmpl-bbbb2222").id
        == find_record(records, "resp_bbbb2").id
        == "bbbb2222"
    )
    assert find_record(records, "aaaa1111").id == "aaaa1111.0"
    for request_id, message in (
        ("aaaa", "may be any of"),
        ("bbb", "4 characters at least"),
        ("nobody", "the last ones are bbbb"),
    ):
        with pytest.raises(RequestNotFoundError, match=message):
            find_record(records, request_id)
    with pytest.raises(RequestNotFoundError, match="none was answered yet, or a purge"):
        find_record([], LAST)


def test_explanation_counts_warm_requests_since() -> None:
    followed = make_record("missed.1", source="shared", why_not_warmer="another request computes up to token 64")
    missed = make_record("missed.0", why_not_warmer="nothing stored")
    refused = make_record("refused", outcome="error")
    warm = [make_record(f"warm.{number}", source="resident", cached_tokens=9, at=number) for number in (2, 1)]
    records = [refused, warm[0], followed, warm[1], missed]
    assert find_record_with_since(records, LAST) == (missed, WarmSince(warm=2, last="warm.2", at=2.0))
    for selection in ([refused, followed, missed], [missed], warm, [refused]):
        assert find_record_with_since(selection, LAST)[1] is None
    assert find_record_with_since(records, missed.id) == (missed, None), "it was named"


def test_purge_deletes_divergence_texts(index: Index) -> None:
    gone = save(index, [*PROMPT, 1]).session
    for name, session in (("gone", gone), ("kept", "other")):
        index.record_request(make_record(name, session=session, parting=make_divergence(stored_text="SECRET")))
    purge(index, PurgeRequest(session=gone))
    assert [(each.id, each.parting) for each in index.requests()] == [("kept", None)]
    assert all(b"SECRET" not in path.read_bytes() for path in index.home.index.rglob("data.mdb"))


def test_two_conversations_are_compared(index: Index) -> None:
    first = save(index, PROMPT).session
    second = save(index, [*PROMPT[:150], *range(50)]).session
    a, b = load_conversation(index, "session", first), load_conversation(index, "session", second)
    assert a is not None and b is not None
    seen = make_record(session=second, parting=make_divergence(150, message=3, message_last=3, role="user"))
    found = compare_conversations(a, b, [seen])
    assert (found.common, found.tokens_a, found.tokens_b, found.same_root) == (150, 200, 200, True)
    assert found.where is not None and (found.where.token, found.where.message) == (150, 3)
    assert found.side_b is not None and found.side_b.tokens == [*PROMPT[118:150], *range(50)]
    beginning = load_conversation(index, "segment", a.leaf)
    assert beginning is not None and compare_conversations(a, beginning, []).where is None
    assert (
        load_conversation(index, "session", "0" * 12) is None and load_conversation(index, "segment", "0" * 32) is None
    )
