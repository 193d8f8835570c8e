"""Planted bugs: cache bugs in the real processes must be detected by the oracle.

Every script first passes without its bug, which shows that the bug is the cause of the failure.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from support.oracle.duel import Duel
from support.oracle.reference import FAMILIES, Reference
from support.oracle.steps import AGAIN, APPEND, BEGIN, Any, Ask, Forget, Fresh, Together
from support.oracle.verdict import Difference
from support.planted.site import planted_bugs as bugs

MakeDuel = Callable[[str, str], Duel]

# A conversation that is restored from disk for its second turn, with others that diverge from it after eight tokens.
RESTORED = (
    Ask(BEGIN, at=3, words=40, dice=1, tokens=20),
    Ask(BEGIN, at=2, words=220, dice=2, tokens=20),
    Ask(BEGIN, at=1, words=220, dice=3, tokens=20),
    Forget(),
    Ask(APPEND, talk=2, words=40, dice=4, tokens=20),
)
# A conversation that continues from memory, at the end of its last answer.
CONTINUED = (
    Ask(BEGIN, at=3, words=150, dice=1, tokens=20),
    Ask(APPEND, talk=0, words=40, dice=2, tokens=20),
    Ask(APPEND, talk=0, words=40, dice=3, tokens=20),
)
# Prompts of different lengths: padding changes a row's bits.
BESIDE_OTHERS = (
    Together(tuple(Ask(BEGIN, at=3, words=20 + 23 * dice, dice=dice, tokens=90) for dice in range(4))),
    Together(tuple(Ask(AGAIN, talk=talk, tokens=90) for talk in range(4))),
)
# A failure after content was sent, so that the request is not dispatched again.
AFTER_A_FAILURE = (
    Ask(BEGIN, at=3, words=150, dice=1, tokens=20, stream=True, fault="decode"),
    Ask(AGAIN, talk=0, tokens=20),
)

PLANTED: list[tuple[str, str, str, tuple[Any, ...]]] = [
    (bugs.SHORT_SEGMENT, "llama", "fast", RESTORED),
    (bugs.STALE_CHECKPOINT, "qwen3_5", "fast", RESTORED),
    (bugs.SKIPPED_LAYER, "llama", "fast", RESTORED),
    (bugs.WRONG_PARENT, "llama", "fast", RESTORED),
    (bugs.KEPT_AFTER_EXCEPTION, "llama", "fast", AFTER_A_FAILURE),
    (bugs.OFF_GRID, "llama", "exact", CONTINUED),
    (bugs.DECODED, "llama", "exact", CONTINUED),
    (bugs.BATCH_OF_TWO, "llama", "exact", BESIDE_OTHERS),
]


@pytest.fixture(scope="module")
def make_duel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeDuel]:
    root = tmp_path_factory.mktemp("oracle")
    with ExitStack() as stack:

        @cache
        def reference(family: str) -> Reference:
            return stack.enter_context(Reference(FAMILIES[family], FAMILIES[family].folder(root)))

        @cache
        def duel(family: str, mode: str) -> Duel:
            new_duel = Duel(reference(family), mode, {"PLANTED_BUGS": "1"})
            stack.callback(new_duel.abandon)
            return stack.enter_context(new_duel)

        yield duel


@pytest.mark.parametrize(("bug", "family", "mode", "script"), PLANTED, ids=[bug for bug, *_ in PLANTED])
def test_oracle_sees_planted_bug(
    bug: str, family: str, mode: str, script: tuple[Any, ...], make_duel: MakeDuel
) -> None:
    duel = make_duel(family, mode)
    play_script(duel, script)
    duel.empty()
    with duel.planted.active_bug(bug), pytest.raises(Difference, match="cold"):
        play_script(duel, script)
    duel.failure = None
    duel.empty()


def play_script(duel: Duel, script: tuple[Any, ...]) -> None:
    for step in (Fresh(1), *script):
        duel.do(step)
