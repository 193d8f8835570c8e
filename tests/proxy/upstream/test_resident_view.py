"""View of the residents in the backend's memory."""

import random
from pathlib import Path

import msgspec
import pytest

from support.proxy.fake_backend import make_layout
from support.proxy.harness import on_loop, run_proxy
from warmline_common.protocol.messages import Resident, ResidentsReply
from warmline_common.protocol.tokens import count_common_tokens, pack_tokens
from warmline_proxy.pipeline.starter import EMPTY_MATCH
from warmline_proxy.planner import Costs, PromptShape, ResidentCandidate, find_usable_position, plan_request
from warmline_proxy.upstream import prefix_index, resident_view
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.resident_view import CONTINUED_MAX, NEAREST_MAX, ResidentEntry, ResidentView

ROOT, OTHER = b"r" * 16, b"o" * 16
LAYOUTS = {grid: msgspec.structs.replace(make_layout(), grid=grid) for grid in (0, 8)}


def make_entry(count: int, root: bytes = ROOT, positions: tuple[int, ...] = ()) -> ResidentEntry:
    return ResidentEntry(root, pack_tokens(range(count)), positions)


def test_durable_ids_are_those_on_disk_oldest_first() -> None:
    view = ResidentView()
    view.add("first", make_entry(10))
    view.add("nowhere else", make_entry(20))
    view.add("last", make_entry(30))
    for name in ("last", "first", "gone meanwhile"):
        view.mark_durable(name)
    assert view.durable_ids() == ["first", "last"]


def test_candidates_share_tokens_and_namespace() -> None:
    view = ResidentView()
    view.add("mine", make_entry(10, positions=(4, 10)))
    view.add("theirs", make_entry(30, OTHER))
    found = view.candidates(ROOT, pack_tokens([*range(8), 99]))
    assert [(each.resident, each.common_tokens, each.positions) for each in found] == [("mine", 8, (4, 10))]


def test_residents_without_root_are_not_adopted() -> None:
    view, tokens = ResidentView(), pack_tokens(range(10))
    with_root, without_root = (
        Resident(id=name, tokens=10, positions=[], bytes_held=1, last_used=0.0, ids=tokens, root=root)
        for name, root in (("said", OTHER), ("unsaid", b""))
    )
    view.update(ResidentsReply(boot="b", generation=0, residents=[with_root, without_root]), known_ids=())
    assert view.ids() == {"said"}
    assert [each.resident for each in view.candidates(OTHER, tokens)] == ["said"]
    assert not view.candidates(ROOT, tokens) and not view.candidates(b"", tokens)


def test_turn_tail_extends_common_prefix() -> None:
    view = ResidentView()
    view.add("mine", ResidentEntry(ROOT, pack_tokens(range(8)), turn_end=12, turn_tail=pack_tokens(range(8, 12))))

    def common(ids: list[int]) -> int:
        return view.candidates(ROOT, pack_tokens(ids))[0].common_tokens

    assert common([*range(20)]) == 12, "its own next turn"
    assert common([*range(10), 99]) == 10, "one that only begins as it does"
    assert common([*range(5), 99]) == 5


@on_loop
async def test_status_of_loading_model_is_fetched_again(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        upstream = Upstream(proxy.backend_url, proxy.home.load_secret())
        backend_state = BackendState(upstream)
        proxy.backend.layout = None  # type: ignore[assignment]
        assert (await backend_state.status()).layout is None
        proxy.backend.layout = make_layout()
        assert (await backend_state.status()).layout == make_layout()
        await upstream.close()


def make_resident(name: str, ids: bytes | None = None) -> Resident:
    return Resident(id=name, tokens=10, positions=[], bytes_held=1, last_used=0.0, ids=ids, root=ROOT)


def test_changes_since_a_listing_remove_what_they_name_alone() -> None:
    view = ResidentView()
    for name in ("dropped", "kept", "left a moment ago"):
        view.add(name, make_entry(10))
    reply = ResidentsReply(
        boot="", generation=1, residents=[make_resident("new")], revision=7, since=5, removed=["dropped"]
    )
    view.update(reply, known_ids=view.ids())
    assert view.ids() == {"kept", "left a moment ago"} and (view.generation, view.revision) == (1, 7)
    view.update(ResidentsReply(boot="", generation=1, residents=[make_resident("kept")], revision=8), {"kept"})
    assert view.ids() == {"kept", "left a moment ago"}, "it came after the complete listing was asked for"


def test_backend_is_told_of_each_durable_resident_once() -> None:
    view = ResidentView()
    for name in ("first", "second", "gone", "third"):
        view.add(name, make_entry(10))
    for name in ("second", "gone", "first"):
        view.mark_durable(name)
    view.remove("gone")
    names = view.take_unordered_ids()
    assert names == ["second", "first"] and not view.take_unordered_ids()
    view.mark_durable("third")
    view.mark_durable("first")
    view.remove("second")
    view.return_unordered_ids(names)
    assert view.take_unordered_ids() == ["first", "third"], "those that were not received come first"
    assert view.non_durable_count == 0


HEAD = [1] * 30


def plan_with_all(view: ResidentView, ids: list[int], grid: int = 0) -> tuple[int, bool]:
    """Reuse, and whether it is without a copy, as a plan that looks at each resident has it."""
    prompt, best = pack_tokens(ids), (0, False)
    for entry in view._entries.values():
        if entry.root != ROOT:
            continue
        common = count_common_tokens(entry.sequence, prompt)
        each = ResidentCandidate("", len(entry), common, entry.positions, entry.turn_end, entry.durable)
        if reuse := find_usable_position(each, len(ids) - 1, grid):
            is_owned = common >= entry.turn_end and (reuse >= len(entry) or entry.durable)
            best = max(best, (reuse, is_owned))
    return best


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("grid", [0, 8])
def test_candidates_give_the_plan_that_all_residents_would(has_positions: bool, grid: int) -> None:
    """A hundred conversations with one head, and some with several turns: few candidates are enough."""
    view, rng = ResidentView(), random.Random(f"{has_positions} {grid}")
    talks = []
    for number in range(100):
        ids = [*HEAD[: rng.choice([8, 16, 30])], *(rng.randrange(50) for _ in range(rng.randrange(2, 40)))]
        talks.append(ids)
        places = sorted({rng.randrange(1, len(ids) + 1) for _ in range(rng.randrange(3))})
        aligned = [at - at % grid if grid else at for at in places]
        positions = tuple(dict.fromkeys(at for at in [*aligned, len(ids)] if at)) if has_positions else ()
        turn_end = rng.randrange(min(31, len(ids)), len(ids) + 1)
        view.add(str(number), ResidentEntry(ROOT, pack_tokens(ids), positions, turn_end, durable=rng.random() < 0.5))
        view.add(f"other {number}", ResidentEntry(OTHER, pack_tokens(ids), positions, turn_end))
    for number in range(0, 100, 7):
        view.remove(str(number))
    for _ in range(300):
        ids = rng.choice(talks)[: rng.randrange(3, 60)] + [rng.randrange(50) for _ in range(rng.randrange(1, 6))]
        found = view.candidates(ROOT, pack_tokens(ids))
        assert len(found) <= NEAREST_MAX + CONTINUED_MAX
        plan = plan_request(PromptShape(len(ids)), found, EMPTY_MATCH, LAYOUTS[grid], Costs())
        assert (plan.reuse, plan.reuse > 0 and not plan.copy_resident) == plan_with_all(view, ids, grid)


def test_candidates_share_no_more_than_is_trusted() -> None:
    view = ResidentView()
    for number in range(50):
        view.add(str(number), make_entry(20 + number))
    view.add("early", ResidentEntry(ROOT, pack_tokens([*range(5), 99])))
    prompt = pack_tokens(range(100))
    assert [each.resident for each in view.candidates(ROOT, prompt, common_max=10)] == ["early"]
    assert len(view.count_shared_tokens(ROOT, prompt)) == 51


def test_lookup_compares_few_of_many_residents(monkeypatch: pytest.MonkeyPatch) -> None:
    view = ResidentView()
    for number in range(2000):
        view.add(str(number), ResidentEntry(ROOT, pack_tokens([*HEAD, number, 1, 2, 3]), turn_end=32))
    comparisons = []

    def count(a: bytes, b: bytes) -> int:
        comparisons.append(a)
        return count_common_tokens(a, b)

    for module in (prefix_index, resident_view):
        monkeypatch.setattr(module, "count_common_tokens", count)
    found = view.candidates(ROOT, pack_tokens([*HEAD, 77, 1, 2, 3, 4, 5]))
    assert "77" in {each.resident for each in found} and len(comparisons) < 40
