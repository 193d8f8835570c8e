"""Bisection against segments whose faults are known: counts of trusted tokens."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.proxy.audits import make_quiet_engine
from support.proxy.fake_backend import make_first_logits, make_layout, pack_text
from warmline_common.protocol.messages import CheckpointRef, FirstLogits, KvLayout, SegmentRef
from warmline_proxy.audit import bisect
from warmline_proxy.audit.bisect import AuditMismatch, Bisector
from warmline_proxy.planner import RequestPlan
from warmline_proxy.store.rows import PrefixMatch
from warmline_proxy.upstream.backend_state import SuspectPrefix
from warmline_proxy.upstream.client import UpstreamConnectionError, UpstreamError

PROMPT = 100
COLD, WRONG = make_first_logits(-3.0), make_first_logits(-0.25)


class FakeSegments:
    """Segments up to `ends`, checkpoints at `states`; starts from more than `right` tokens give wrong logits."""

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
        return pack_text(b"x" * int(segment[1:]))

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


def count_trusted(files: FakeSegments, reuse: int, kv_layout: KvLayout) -> int:
    suspicion = SuspectPrefix(b"root", pack_text(b"x" * PROMPT))
    case = AuditMismatch(b"root", suspicion.tokens, reuse, COLD, kv_layout, 1e-3, started_at=0.0)
    bisector = Bisector(files, files, make_quiet_engine())  # type: ignore[arg-type]
    asyncio.run(bisector.narrow_suspicion(case, suspicion))
    return suspicion.trusted_tokens


places = st.lists(st.integers(1, PROMPT - 1), min_size=1, max_size=12, unique=True).map(sorted)


@given(places, st.integers(0, PROMPT), st.integers(1, PROMPT - 1), st.sampled_from([0, 8]))
def test_bisection_finds_last_good_place(ends: list[int], right: int, reuse: int, grid: int) -> None:
    files = FakeSegments(ends, right, [], {})
    tried = {
        place
        for end in [*ends, reuse]
        if (place := min(end, reuse, ends[-1])) and (place := place - place % (grid or 1))
    }
    expected = max((place for place in tried if place <= right), default=0)
    assert count_trusted(files, reuse, make_layout(grid=grid)) == (
        expected if any(place > right for place in tried) else 0
    )
    assert all(0 < at <= reuse and at % (grid or 1) == 0 for at in files.tried) and len(files.tried) <= 5


@given(places, places, st.integers(0, PROMPT))
def test_models_with_states_are_probed_at_checkpoints_only(ends: list[int], states: list[int], right: int) -> None:
    files = FakeSegments(ends, right, states, {})
    reachable = {at for at in states if at <= ends[-1]}
    good = count_trusted(files, PROMPT - 1, make_layout(has_states=True))
    assert set(files.tried) <= reachable
    assert good == (
        max((at for at in reachable if at <= right), default=0) if any(at > right for at in reachable) else 0
    )


class FakeBranch(FakeSegments):
    """Prompt that leaves a segment of 30 tokens at 20, with states at 10, at 30, and at 40 on its own branch."""

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
def test_segment_continued_by_others_is_judged_by_its_own_path(right: int, good: int) -> None:
    files = FakeBranch(right)
    assert count_trusted(files, PROMPT - 1, make_layout(has_states=True)) == good and files.tried == [40, 10, 30]


@pytest.mark.parametrize("failure", [UpstreamConnectionError("as scripted"), None])
@given(places, st.integers(0, PROMPT), st.integers(0, 4))
def test_failed_probes_leave_untried_tokens_untrusted(
    failure: UpstreamError | None, ends: list[int], right: int, number: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bisect, "TRY_INTERVAL_S", 0.0)
        files = FakeSegments(ends, right, [], dict.fromkeys(range(number, 99), failure))
        good = count_trusted(files, PROMPT - 1, make_layout())
    assert good in (0, *files.tried[1:number]) and (not good or good <= right < max(ends))


def test_probe_without_memory_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisect, "TRY_INTERVAL_S", 0.0)
    files = FakeSegments([10, 20, 30], 20, [], {0: None, 1: None})
    assert count_trusted(files, 30, make_layout()) == 20 and files.tried == [30, 30, 30, 20]
