"""How much of what is stored along a prompt is found good, against files whose faults are known."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.proxy.fake_backend import first_logits, layout, packed
from warmline_common.protocol.messages import CheckpointRef, FirstLogits, KvLayout, SegmentRef
from warmline_proxy.audit import bisect as blame
from warmline_proxy.audit.bisect import AuditMismatch, Bisector
from warmline_proxy.planner import RequestPlan
from warmline_proxy.store.rows import PrefixMatch
from warmline_proxy.upstream.backend_state import SuspectPrefix
from warmline_proxy.upstream.client import UpstreamConnectionError, UpstreamError

PROMPT = 100
COLD, WRONG = first_logits(-3.0), first_logits(-0.25)


class Files:
    """Segments that end at `ends`, checkpoints at `states`; whoever starts from more than `right` tokens is wrong."""

    def __init__(self, ends: list[int], right: int, states: list[int], fails: dict[int, UpstreamError | None]) -> None:
        spans = zip([0, *ends[:-1]], ends, strict=True)
        self._chain = [SegmentRef(id=f"s{end}", start=start, end=end, upto=end) for start, end in spans]
        self._states = [CheckpointRef(id=f"c{at}", position=at) for at in states]
        self._right, self._fails = right, fails
        self.tried: list[int] = []

    def match_prefix(self, root: bytes, tokens: bytes, limit: int) -> PrefixMatch:
        tokens_matched = min(limit, self._chain[-1].end if self._chain else 0)
        chain = [
            SegmentRef(id=link.id, start=link.start, end=link.end, upto=min(link.end, limit))
            for link in self._chain
            if link.start < limit
        ]
        states = [each for each in self._states if each.position <= tokens_matched]
        return PrefixMatch(tokens=tokens_matched, chain=chain, checkpoints=states, end_reason="")

    def path_tokens(self, segment: str) -> bytes:
        return packed(b"x" * int(segment[1:]))

    async def compute_cold(self, root: bytes, tokens: bytes) -> FirstLogits:
        return COLD

    async def compute_restored(self, root: bytes, tokens: bytes, plan: RequestPlan) -> FirstLogits | None:
        number = len(self.tried)
        self.tried.append(plan.reuse)
        if number in self._fails:
            if error := self._fails[number]:
                raise error
            return None
        return COLD if plan.reuse <= self._right else WRONG


def found(files: Files, reuse: int, facts: KvLayout) -> int:
    suspicion = SuspectPrefix(b"root", packed(b"x" * PROMPT))
    case = AuditMismatch(b"root", suspicion.tokens, reuse, COLD, facts, 1e-3, started_at=0.0)
    asyncio.run(Bisector(files, files).narrow_suspicion(case, suspicion))  # type: ignore[arg-type]
    return suspicion.trusted_tokens


places = st.lists(st.integers(1, PROMPT - 1), min_size=1, max_size=12, unique=True).map(sorted)


@given(places, st.integers(0, PROMPT), st.integers(1, PROMPT - 1), st.sampled_from([0, 8]))
def test_the_last_good_place_is_found(ends: list[int], right: int, reuse: int, grid: int) -> None:
    files = Files(ends, right, [], {})
    tried = {
        place
        for end in [*ends, reuse]
        if (place := min(end, reuse, ends[-1])) and (place := place - place % (grid or 1))
    }
    expected = max((place for place in tried if place <= right), default=0)
    assert found(files, reuse, layout(grid=grid)) == (expected if any(place > right for place in tried) else 0)
    assert all(0 < at <= reuse and at % (grid or 1) == 0 for at in files.tried) and len(files.tried) <= 5


@given(places, places, st.integers(0, PROMPT))
def test_models_with_states_are_started_at_checkpoints_only(ends: list[int], states: list[int], right: int) -> None:
    files = Files(ends, right, states, {})
    there = {at for at in states if at <= ends[-1]}
    good = found(files, PROMPT - 1, layout(has_states=True))
    assert set(files.tried) <= there
    assert good == (max((at for at in there if at <= right), default=0) if any(at > right for at in there) else 0)


class Branch(Files):
    """The prompt leaves a file of 30 tokens at 20; there are states at 10, at 40 of the prompt's own, and at 30."""

    def __init__(self, right: int) -> None:
        super().__init__([30], right, [10, 30], {})

    def match_prefix(self, root: bytes, tokens: bytes, limit: int) -> PrefixMatch:
        own = super().match_prefix(root, tokens, limit)
        if limit == 30:
            return own
        chain = [SegmentRef(id="s30", start=0, end=30, upto=20), SegmentRef(id="t40", start=20, end=40, upto=40)]
        states = [CheckpointRef(id="c10", position=10), CheckpointRef(id="d40", position=40)]
        return PrefixMatch(tokens=40, chain=chain, checkpoints=states, end_reason="")


@pytest.mark.parametrize(("right", "good"), [(30, 20), (10, 10)])
def test_a_file_that_others_go_on_with_is_asked_by_itself(right: int, good: int) -> None:
    files = Branch(right)
    assert found(files, PROMPT - 1, layout(has_states=True)) == good and files.tried == [40, 10, 30]


@pytest.mark.parametrize("failure", [UpstreamConnectionError("as scripted"), None])
@given(places, st.integers(0, PROMPT), st.integers(0, 4))
def test_what_is_not_shown_to_be_good_is_not_taken_for_it(
    failure: UpstreamError | None, ends: list[int], right: int, number: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blame, "TRY_INTERVAL_S", 0.0)
        files = Files(ends, right, [], dict.fromkeys(range(number, 99), failure))
        good = found(files, PROMPT - 1, layout())
    assert good in (0, *files.tried[1:number]) and (not good or good <= right < max(ends))


def test_one_try_that_makes_way_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "TRY_INTERVAL_S", 0.0)
    files = Files([10, 20, 30], 20, [], {0: None, 1: None})
    assert found(files, 30, layout()) == 20 and files.tried == [30, 30, 30, 20]
