"""Oracle as a hypothesis state machine: steps on one duel, in any order."""

from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from support.oracle.duel import Duel
from support.oracle.steps import (
    AGAIN,
    APPEND,
    BEGIN,
    BRANCH,
    EDIT,
    LEAVE_IN_DECODE,
    LEAVE_IN_PREFILL,
    LENGTH,
    TOOLS,
    WORD,
    Ask,
    Forget,
    Fresh,
    Kill,
    Purge,
    Restart,
    Together,
)

ANY_NUMBER = st.integers(0, 1 << 16)
SEEDS = st.integers(0, 1 << 32)
WORDS = st.sampled_from([1, 9, 40, 64, 150, 400])
ASKS_MAX, TOKENS_TOGETHER = 8, 60


def make_asks(exact: bool, **fixed: Any) -> st.SearchStrategy[Ask]:
    drawn: dict[str, Any] = {
        "how": st.sampled_from([BEGIN, APPEND, APPEND, BRANCH, EDIT, AGAIN]),
        "talk": ANY_NUMBER,
        "at": ANY_NUMBER,
        "words": WORDS,
        "dice": SEEDS,
        "tokens": st.integers(1, 24),
        "end": st.sampled_from([LENGTH, LENGTH, WORD]),
        "stream": st.booleans(),
        "sampled": st.booleans() if exact else st.just(False),
    }
    return st.builds(Ask, **{**drawn, **{name: st.just(value) for name, value in fixed.items()}})


RESTARTS = st.builds(
    Restart,
    how=st.sampled_from(["softly", "-9", "-9 backend", "-9 proxy"]),
    settled=st.booleans(),
    small_disk=st.booleans(),
    small_memory=st.booleans(),
)
DROP_INTERVAL = 6  # steps between two that delete something; else few answers would be warm


class OracleMachine(RuleBasedStateMachine):
    """Rules over the duel that a subclass sets.  Restarts are rare, since each takes seconds."""

    duel: Duel
    exact: bool
    restart_interval: int

    def __init__(self) -> None:
        super().__init__()
        self._since_restart = self._since_drop = 0

    @initialize(salt=SEEDS, restart=RESTARTS)
    def begin(self, salt: int, restart: Restart) -> None:
        if len(self.duel.script) > self.restart_interval:
            self._do(restart)
        self._do(Fresh(salt))

    def _do(self, step: Any) -> None:
        self._since_restart = 0 if isinstance(step, Restart | Kill) else self._since_restart + 1
        self._since_drop = 0 if isinstance(step, Forget | Purge | Restart) else self._since_drop + 1
        self.duel.do(step)

    def _draw_and_ask(self, data: st.DataObject, **fixed: Any) -> None:
        self._do(data.draw(make_asks(self.exact, **fixed)))

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self._draw_and_ask(data, how=BEGIN)

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self._draw_and_ask(data, how=APPEND)

    @rule(data=st.data())
    def continue_last(self, data: st.DataObject) -> None:
        """Continue the latest conversation, as an agent does."""
        self._draw_and_ask(data, how=APPEND, talk=-1)

    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        self._draw_and_ask(data, how=BRANCH)

    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        self._draw_and_ask(data, how=EDIT)

    @rule(data=st.data())
    def regenerate(self, data: st.DataObject) -> None:
        self._draw_and_ask(data, how=AGAIN)

    @rule(data=st.data())
    def change_tools(self, data: st.DataObject) -> None:
        self._draw_and_ask(data, how=TOOLS)

    @rule(data=st.data())
    def stop_by_word(self, data: st.DataObject) -> None:
        self._draw_and_ask(data, end=WORD, tokens=24)

    @rule(data=st.data(), after=st.integers(0, 4))
    def leave_in_prefill(self, data: st.DataObject, after: int) -> None:
        self._draw_and_ask(data, end=LEAVE_IN_PREFILL, after=after, words=400)

    @rule(data=st.data(), after=st.integers(0, 12))
    def leave_in_decode(self, data: st.DataObject, after: int) -> None:
        self._draw_and_ask(data, end=LEAVE_IN_DECODE, after=after, tokens=24)

    @rule(data=st.data(), fault=st.sampled_from(["prefill", "first", "decode"]))
    def fail(self, data: st.DataObject, fault: str) -> None:
        self._draw_and_ask(data, fault=fault, how=APPEND)

    @rule(data=st.data())
    def together(self, data: st.DataObject) -> None:
        """Ask several at once, with answers long enough to overlap."""
        each = make_asks(self.exact, tokens=TOKENS_TOGETHER)
        self._do(Together(tuple(data.draw(st.lists(each, min_size=2, max_size=ASKS_MAX)))))

    @precondition(lambda self: self._since_drop >= DROP_INTERVAL)
    @rule()
    def forget(self) -> None:
        self._do(Forget())

    @precondition(lambda self: self._since_drop >= DROP_INTERVAL)
    @rule(which=ANY_NUMBER)
    def purge(self, which: int) -> None:
        self._do(Purge(which))

    @precondition(lambda self: self._since_restart >= self.restart_interval)
    @rule(
        data=st.data(),
        process=st.sampled_from(["proxy", "backend"]),
        nth=st.integers(1, 40),
        when=st.sampled_from(["before", "middle", "after"]),
    )
    def kill_at_the_disk(self, data: st.DataObject, process: str, nth: int, when: str) -> None:
        self._do(Kill(process, nth, when, data.draw(make_asks(self.exact, end=LENGTH))))

    @precondition(lambda self: self._since_restart >= self.restart_interval)
    @rule(restart=RESTARTS)
    def restart(self, restart: Restart) -> None:
        self._do(restart)


def run_machine(duel: Duel, seed_number: int, examples: int, steps: int, restart_interval: int) -> None:
    """Run the machine without shrinking: the home outlives an example, so only the whole script is a proof."""

    class Bound(OracleMachine):
        pass

    Bound.duel, Bound.exact, Bound.restart_interval = duel, duel.mode == "exact", restart_interval
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        seed(seed_number)(Bound),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
