"""Plans as a table: residents, stored prefix, layout, and the expected start."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.proxy.fake_backend import make_layout
from warmline_common.measurement.duration_model import DurationModel
from warmline_common.protocol.messages import CheckpointRef, KvLayout, MessageEnd, SegmentRef
from warmline_proxy.estimate.costs import Costs
from warmline_proxy.planner import (
    PromptShape,
    ResidentCandidate,
    RunningRequest,
    choose_checkpoint_positions,
    plan_cold,
    plan_request,
)
from warmline_proxy.store.rows import PrefixMatch

COSTS = Costs(DurationModel(unit_s=0.01), DurationModel(0.01, 1e-6))  # 10 ms a token to compute, 0.1 ms a row to read
HYBRID = make_layout(has_states=True, state_bytes=1000)


def make_match(tokens: int, checkpoints: tuple[int, ...] = (), why: str = "differs") -> PrefixMatch:
    chain = [SegmentRef(id=f"s{start}", start=start, end=start + 100, upto=min(tokens, start + 100))
             for start in range(0, tokens, 100)]  # fmt: skip
    at = [CheckpointRef(id=f"c{position}", position=position) for position in checkpoints]
    return PrefixMatch(tokens=tokens, chain=chain, checkpoints=at, end_reason=why)


@dataclass(frozen=True)
class Case:
    name: str
    source: str
    reuse: int
    prompt: int = 300
    residents: list[ResidentCandidate] = field(default_factory=list)
    match: PrefixMatch = field(default_factory=lambda: make_match(0, why="nothing stored"))
    layout: KvLayout | None = field(default_factory=make_layout)
    why: str = ""


CASES = [
    Case("nothing known", "cold", 0, why="nothing stored"),
    Case("a resident", "resident", 200, residents=[ResidentCandidate("r", 200, 200)], why="in memory up to token 200"),
    Case("never the whole prompt", "resident", 299, residents=[ResidentCandidate("r", 400, 300)]),
    Case("never the whole prompt, restored", "restored", 299, match=make_match(300)),
    Case("a prompt of one token", "cold", 0, prompt=1, residents=[ResidentCandidate("r", 9, 1)], match=make_match(1)),
    Case("memory beats disk", "resident", 200, residents=[ResidentCandidate("r", 200, 200)], match=make_match(200),
         why="in memory up to token 200"),
    Case("disk where it reaches further", "restored", 280, residents=[ResidentCandidate("r", 90, 90)],
         match=make_match(280), why="differs"),
    Case("memory where disk gains too little", "resident", 278, residents=[ResidentCandidate("r", 278, 278)],
         match=make_match(280), why="restoring 280 tokens would take longer"),
    Case("cold where reading costs more", "cold", 0, match=make_match(100), layout=make_layout(row_bytes=10**8),
         why="restoring 100 tokens would take longer"),
    Case("a template's first tokens say nothing", "cold", 0, match=make_match(24), why="differs"),
    Case("a resident only at its positions", "resident", 120,
         residents=[ResidentCandidate("r", 250, 200, (50, 120, 250))], layout=HYBRID,
         why="differs from what is in memory at token 200; no checkpoint after token 120"),
    Case("a resident past all its positions", "cold", 0, residents=[ResidentCandidate("r", 250, 200, (250,))],
         layout=HYBRID, why="differs from what is in memory at token 200; no checkpoint after token 0"),
    Case("states restore at checkpoints", "restored", 150, match=make_match(250, (40, 150, 290)), layout=HYBRID,
         why="differs; no checkpoint after token 150"),
    Case("states without a checkpoint", "cold", 0, match=make_match(250), layout=HYBRID,
         why="differs; no checkpoint after token 0"),
    Case("a checkpoint at the very end is too far", "restored", 150, match=make_match(300, (150, 300)), layout=HYBRID,
         why="all of it is stored; no checkpoint after token 150"),
    Case("no codec", "cold", 0, match=make_match(250), layout=make_layout(persistent=False, why_not="no codec for X"),
         why="not persistent: no codec for X"),
    Case("layout not known yet", "cold", 0, match=make_match(250), layout=None, why="differs"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plan(case: Case) -> None:
    plan = plan_request(PromptShape(case.prompt), case.residents, case.match, case.layout, COSTS)
    assert (plan.source, plan.reuse, plan.why_not_warmer) == (case.source, case.reuse, case.why)
    assert plan.reuse < case.prompt
    assert sum(link.upto - link.start for link in plan.chain) == (plan.reuse if plan.source == "restored" else 0)
    assert (plan.checkpoint.position if plan.checkpoint else plan.reuse) == plan.reuse


def test_shortest_of_equal_residents_is_chosen() -> None:
    residents = [ResidentCandidate("long", 900, 200), ResidentCandidate("exact", 200, 200)]
    assert plan_request(PromptShape(300), residents, make_match(0), make_layout(), COSTS).resident == "exact"


@pytest.mark.parametrize(
    ("common", "keep"),
    [(250, False), (200, False), (180, False), (179, True), (20, True)],
    ids=["all of it", "into its answer", "all of its prompt's messages", "less than these", "a system prompt"],
)
def test_only_same_conversation_takes_resident_over(common: int, keep: bool) -> None:
    """A prompt that repeats all messages of the last turn continues it; one that shares less branches off."""
    resident = ResidentCandidate("r", 250, common, turn_end=180, durable=True)
    plan = plan_request(PromptShape(300), [resident], make_match(0), make_layout(), COSTS)
    assert (plan.resident, plan.reuse, plan.copy_resident) == ("r", common, keep)


def test_unsaved_tail_is_copied() -> None:
    fresh = ResidentCandidate("r", 250, 200, turn_end=180)
    assert plan_request(PromptShape(300), [fresh], make_match(0), make_layout(), COSTS).copy_resident
    whole = ResidentCandidate("r", 250, 250, turn_end=180)
    assert not plan_request(PromptShape(300), [whole], make_match(0), make_layout(), COSTS).copy_resident


@pytest.mark.parametrize("mine_first", [True, False])
def test_own_resident_goes_before_copied_one(mine_first: bool) -> None:
    """Residents in exact mode with one system prompt may end at one position; copies pile up."""
    mine, others = (
        ResidentCandidate("mine", 200, 260, turn_end=260),
        ResidentCandidate("others", 200, 240, turn_end=250),
    )
    residents = [mine, others] if mine_first else [others, mine]
    plan = plan_request(PromptShape(300), residents, make_match(0), make_layout(grid=100), COSTS)
    assert (plan.resident, plan.reuse, plan.copy_resident) == ("mine", 200, False)
    longer = replace(mine, tokens=280, common_tokens=220, turn_end=210, durable=True)
    plan = plan_request(
        PromptShape(300), [replace(others, common_tokens=220), longer], make_match(0), make_layout(grid=100), COSTS
    )
    assert (plan.resident, plan.copy_resident) == ("mine", False)


LEADER = RunningRequest("leader", common_tokens=300, tokens=300, prefilled=100, started=True)


@pytest.mark.parametrize(
    ("running", "source", "reuse"),
    [
        ([LEADER], "shared", 299),
        ([replace(LEADER, common_tokens=250)], "shared", 250),
        ([replace(LEADER, common_tokens=63)], "cold", 0),
        ([replace(LEADER, prefilled=0)], "shared", 299),
        ([replace(LEADER, prefilled=0, started=False)], "shared", 299),
        ([replace(LEADER, tokens=9000, started=False)], "cold", 0),
        ([replace(LEADER, common_tokens=100), replace(LEADER, request_id="further", common_tokens=200)], "shared", 200),
        ([], "cold", 0),
    ],
    ids=[
        "the same prompt",
        "a part of it",
        "too little to share",
        "one that has just begun",
        "one that waits, as long as we",
        "not a long one that waits",
        "the one that reaches furthest",
        "nobody",
    ],
)
def test_running_prefill_is_shared(running: list[RunningRequest], source: str, reuse: int) -> None:
    plan = plan_request(PromptShape(300), [], make_match(0), make_layout(), COSTS, running=running)
    assert (plan.source, plan.reuse) == (source, reuse)
    assert plan.leader_id == (running[-1].request_id if source == "shared" else "")


def test_shared_start_does_not_diverge_from_a_shorter_prefix() -> None:
    """Nothing was lost where a known prompt differs within the tokens that the leader computes."""
    resident = ResidentCandidate("r", tokens=200, common_tokens=40)
    plan = plan_request(PromptShape(300), [resident], make_match(0), make_layout(), COSTS, running=[LEADER])
    assert (plan.source, plan.reuse, plan.diverges_at, plan.why_not_warmer) == ("shared", 299, None, "")
    alone = plan_request(PromptShape(300), [resident], make_match(0), make_layout(), COSTS)
    assert (alone.source, alone.diverges_at, alone.diverges_from) == ("resident", 40, "r")


def test_no_leader_for_known_prefix() -> None:
    resident = ResidentCandidate("r", 290, 290)
    assert (
        plan_request(PromptShape(300), [resident], make_match(0), make_layout(), COSTS, running=[LEADER]).source
        == "resident"
    )
    behind = replace(LEADER, prefilled=0)
    assert (
        plan_request(
            PromptShape(300), [ResidentCandidate("r", 200, 200)], make_match(0), make_layout(), COSTS, running=[behind]
        ).resident
        == "r"
    )


@pytest.mark.parametrize(
    ("leader", "layout", "source"),
    [
        (replace(LEADER, started=False, dispatched=False), make_layout(), "shared"),
        (replace(LEADER, started=False, dispatched=False, tokens=9000), make_layout(), "restored"),
        (replace(LEADER, prefilled=299), make_layout(), "shared"),
        (replace(LEADER, prefilled=0), make_layout(), "restored"),
        (replace(LEADER, common_tokens=250, prefilled=250), make_layout(), "restored"),
        (replace(LEADER, prefilled=299), make_layout(has_windows=True), "restored"),
    ],
    ids=[
        "one that will restore the same",
        "not a long one",
        "one that has restored the same",
        "not one that computes it",
        "not one that shares less",
        "not one whose windows pass the place at once",
    ],
)
def test_prefix_on_disk_is_restored_once(leader: RunningRequest, layout: KvLayout, source: str) -> None:
    plan = plan_request(PromptShape(300), [], make_match(299), layout, COSTS, running=[leader])
    assert (plan.source, plan.reuse) == (source, 299)


@pytest.mark.parametrize(("stored", "source"), [(8, "shared"), (100, "restored")])
def test_leader_is_followed_unless_start_alone_is_clearly_sooner(stored: int, source: str) -> None:
    """The template's first tokens on disk don't make two requests compute the same prompt at once."""
    leader = replace(LEADER, prefilled=0)
    plan = plan_request(PromptShape(300), [], make_match(stored), make_layout(), COSTS, running=[leader])
    assert (plan.source, plan.reuse) == (source, 299 if source == "shared" else stored)


def test_plan_without_measured_rates() -> None:
    assert plan_request(PromptShape(300), [], make_match(200), make_layout(), Costs()).source == "restored"


@pytest.mark.parametrize(
    ("prompt", "start", "positions"),
    [
        (PromptShape(300, (100, 200, 290), 290), 0, (100, 290)),
        (PromptShape(300, (100, 200, 290), 290), 100, (290,)),
        (PromptShape(300, (100, 200, 290), 290), 290, ()),
        (PromptShape(9000, (100, 8990), 8990), 0, (100, 2048, 4096, 6144, 8192, 8990)),
        (PromptShape(8300, (2000, 8290), 8290), 0, (2000, 4096, 6144, 8290)),
        (PromptShape(5000), 0, (2048, 4096)),
        (PromptShape(40_000, (100,), 0), 0, (100, *range(6144, 40_000, 6144))),
        (PromptShape(1), 0, ()),
    ],
)
def test_checkpoint_positions(prompt: PromptShape, start: int, positions: tuple[int, ...]) -> None:
    assert choose_checkpoint_positions(prompt, start, HYBRID) == positions
    assert plan_cold(prompt, make_layout(), COSTS, "").checkpoint_positions == ()


def test_checkpoint_gap_is_limited() -> None:
    prompt = PromptShape(40_000, (100,), 0)
    assert choose_checkpoint_positions(prompt, 0, HYBRID, 4096) == (100, *range(4096, 40_000 - 512, 4096))
    assert choose_checkpoint_positions(prompt, 0, HYBRID, 8192) == choose_checkpoint_positions(prompt, 0, HYBRID)
    closest = choose_checkpoint_positions(prompt, 0, HYBRID, 1)
    assert closest[1:4] == (1024, 1536, 2048), "but not closer than the minimum gap"


SYSTEM, QUESTION = MessageEnd(end=50, number=1, role="system"), MessageEnd(end=80, number=2, role="user")
ANSWER = MessageEnd(end=120, number=3, role="assistant", note="the template leaves out its reasoning")
TOOLS, LAST = MessageEnd(end=40, number=0, role="tools"), MessageEnd(end=290, number=9, role="tool")


@pytest.mark.parametrize(
    ("at", "where"),
    [
        (39, ", in the tools"),
        (40, ", in message 1 (system)"),
        (79, ", in message 2 (user)"),
        (80, ", in message 3 (assistant): the template leaves out its reasoning"),
        (113, ", in message 3 (assistant)"),
        (120, ", in messages 4 to 9"),
        (290, ", after the last message"),
    ],
)
def test_divergence_is_located_in_messages(at: int, where: str) -> None:
    prompt = PromptShape(300, messages=(TOOLS, SYSTEM, QUESTION, ANSWER, LAST))
    here = make_match(at, why=f"differs from what is stored at token {at}")
    here.is_divergent = True
    plan = plan_request(prompt, [], here, make_layout(), COSTS)
    assert plan.why_not_warmer == f"differs from what is stored at token {at}{where}"
    resident = ResidentCandidate("r", at + 1, at)
    plan = plan_request(prompt, [resident], make_match(0), make_layout(), COSTS)
    assert plan.why_not_warmer == f"differs from what is in memory at token {at}{where}"


def test_reason_of_longest_prefix_is_given() -> None:
    prompt, stopped = PromptShape(300, messages=(QUESTION,)), make_match(200, why="stored up to token 200")
    plan = plan_request(prompt, [ResidentCandidate("r", 90, 60)], stopped, make_layout(), COSTS)
    assert plan.why_not_warmer == "stored up to token 200"
    assert plan_request(
        prompt, [ResidentCandidate("r", 250, 220)], stopped, make_layout(), COSTS
    ).why_not_warmer.startswith("differs")
    assert (
        plan_request(PromptShape(300), [], make_match(0, why="nothing stored"), make_layout(), COSTS).why_not_warmer
        == "nothing stored"
    )


# ---- exact mode: everything on the grid

GRID = 64
EXACT, EXACT_HYBRID = make_layout(grid=GRID), make_layout(grid=GRID, has_states=True, state_bytes=1000)
ON_GRID = "exact mode keeps and reuses multiples of 64 tokens"


@pytest.mark.parametrize(
    "case",
    [
        Case("a resident up to the grid", "resident", 128, residents=[ResidentCandidate("r", 128, 150)],
             why=f"in memory up to token 128; {ON_GRID}"),
        Case("disk up to the grid", "restored", 192, match=make_match(200), why=f"differs; {ON_GRID}"),
        Case("all but what lies past the grid", "restored", 256, match=make_match(300), why=ON_GRID),
        Case("never the whole prompt", "restored", 192, prompt=256, match=make_match(256), why=ON_GRID),
        Case("a prompt shorter than the grid", "cold", 0, prompt=64, match=make_match(63), why=ON_GRID),
        Case("nothing stored", "cold", 0, why=f"nothing stored; {ON_GRID}"),
        Case("less than the grid in common", "cold", 0, match=make_match(63), why=f"differs; {ON_GRID}"),
        Case("positions off the grid are not used", "resident", 64,
             residents=[ResidentCandidate("r", 250, 250, (64, 100, 250))], why=f"in memory up to token 250; {ON_GRID}"),
        Case("nor checkpoints", "restored", 128, match=make_match(250, (64, 128, 200)),
             layout=EXACT_HYBRID, why="differs; no checkpoint after token 128"),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_exact_plan(case: Case) -> None:
    case = case if case.layout is EXACT_HYBRID else replace(case, layout=EXACT)
    test_plan(case)


@pytest.mark.parametrize(
    ("common", "keep"), [(150, False), (140, False), (139, True)], ids=["all of it", "its turn", "less than its turn"]
)
def test_resident_shorter_than_its_turn_is_taken_over_by_own_conversation(common: int, keep: bool) -> None:
    resident = ResidentCandidate("r", 128, common, turn_end=140, durable=True)
    plan = plan_request(PromptShape(300), [resident], make_match(0), EXACT, COSTS)
    assert (plan.resident, plan.reuse, plan.copy_resident) == ("r", 128, keep)


@pytest.mark.parametrize(
    ("leader", "source", "reuse"),
    [
        (LEADER, "shared", 256),
        (replace(LEADER, common_tokens=127), "shared", 64),
        (replace(LEADER, common_tokens=128, tokens=128), "shared", 64),
        (replace(LEADER, common_tokens=63), "cold", 0),
    ],
    ids=["the same prompt", "a part of it", "its last token comes after its last place", "less than the grid"],
)
def test_leader_is_copied_on_grid(leader: RunningRequest, source: str, reuse: int) -> None:
    plan = plan_request(PromptShape(300), [], make_match(0), EXACT, COSTS, running=[leader])
    assert (plan.source, plan.reuse) == (source, reuse)


@pytest.mark.parametrize(
    ("prompt", "start", "positions"),
    [
        (PromptShape(300, (100, 200, 290), 290), 0, (64, 256)),
        (PromptShape(300, (100, 200, 210), 210), 0, (64, 192, 256)),
        (PromptShape(300, (100, 200, 290), 290), 64, (256,)),
        (PromptShape(300, (100, 200, 290), 290), 256, ()),
        (PromptShape(257), 0, (256,)),
        (PromptShape(256), 0, (192,)),
        (PromptShape(64, (10, 60), 60), 0, ()),
        (PromptShape(5000), 0, (2048, 4096, 4992)),
    ],
)
def test_checkpoint_positions_on_grid(prompt: PromptShape, start: int, positions: tuple[int, ...]) -> None:
    assert choose_checkpoint_positions(prompt, start, make_layout(has_states=True, grid=GRID)) == positions


def test_checkpoint_strides_on_grid() -> None:
    prompt = PromptShape(20_000, (), 0)
    assert choose_checkpoint_positions(prompt, 0, make_layout(has_states=True, grid=4096)) == (
        4096,
        8192,
        12_288,
        16_384,
    )
    uneven = choose_checkpoint_positions(prompt, 0, make_layout(has_states=True, grid=1000), gap_max=8192)
    assert uneven == (*range(4000, 20_000, 4000), 19_000)


@st.composite
def draw_candidates(draw: st.DrawFn) -> ResidentCandidate:
    tokens = draw(st.integers(1, 900))
    common = draw(st.integers(1, tokens + 100))
    positions = draw(st.just(()) | st.lists(st.integers(1, tokens), unique=True).map(lambda at: tuple(sorted(at))))
    return ResidentCandidate("r", tokens, common, positions, draw(st.integers(0, tokens + 100)), draw(st.booleans()))


@st.composite
def draw_running(draw: st.DrawFn) -> RunningRequest:
    tokens = draw(st.integers(1, 900))
    common = draw(st.integers(1, tokens))
    return RunningRequest("leader", common, tokens, draw(st.integers(0, tokens)), draw(st.booleans()))


@st.composite
def draw_matches(draw: st.DrawFn) -> PrefixMatch:
    tokens = draw(st.integers(0, 800))
    at = draw(st.lists(st.integers(1, tokens), unique=True, max_size=4)) if tokens else []
    return make_match(tokens, tuple(sorted(at)))


@st.composite
def draw_prompts(draw: st.DrawFn) -> PromptShape:
    tokens = draw(st.integers(1, 900))
    boundaries = sorted(draw(st.lists(st.integers(1, tokens), unique=True, max_size=5)))
    return PromptShape(tokens, boundaries, draw(st.sampled_from([0, *boundaries])))


@given(
    prompt=draw_prompts(),
    residents=st.lists(draw_candidates(), max_size=3),
    match=draw_matches(),
    running=st.lists(draw_running(), max_size=2),
    has_states=st.booleans(),
    grid=st.sampled_from([0, 16, 64, 512]),
)
def test_any_plan_is_continuable(
    prompt: PromptShape,
    residents: list[ResidentCandidate],
    match: PrefixMatch,
    running: list[RunningRequest],
    has_states: bool,
    grid: int,
) -> None:
    plan = plan_request(prompt, residents, match, make_layout(grid=grid, has_states=has_states), COSTS, running=running)
    assert 0 <= plan.reuse < prompt.tokens, "never the whole prompt"
    assert all(plan.reuse < at < prompt.tokens for at in plan.checkpoint_positions)
    assert list(plan.checkpoint_positions) == sorted(set(plan.checkpoint_positions))
    assert bool(plan.checkpoint_positions) <= has_states
    if grid:
        assert not any(at % grid for at in (plan.reuse, *plan.checkpoint_positions)), "all on the grid"
    if grid and has_states:
        last = (prompt.tokens - 1) // grid * grid
        assert last in (plan.reuse, *plan.checkpoint_positions), "the result can be continued"
    if plan.source == "restored":
        assert sum(link.upto - link.start for link in plan.chain) == plan.reuse <= match.tokens
        assert (plan.checkpoint.position if plan.checkpoint else 0) == (plan.reuse if has_states else 0)
    if plan.source == "resident":
        assert any(plan.reuse <= min(each.tokens, each.common_tokens) for each in residents)
        assert any(not each.positions or plan.reuse in each.positions for each in residents)
    if plan.source == "shared":
        assert any(plan.reuse <= each.common_tokens for each in running)
    assert plan.why_not_warmer or plan.reuse == prompt.tokens - 1, "with a reason why it is not warmer"
