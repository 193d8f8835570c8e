"""Speculation for tests: drafts that are often right, often wrong, and of any length."""

import random
from collections.abc import Container, Sequence

from support.backend.engine_driver import SchedulerDriver
from warmline_backend.model.model import ServedModel
from warmline_backend.speculation.acceptance import Acceptance
from warmline_backend.speculation.draft import PROMPT_LOOKUP, Draft, DraftSource, TokenHistory
from warmline_backend.speculation.drafter import Drafter
from warmline_backend.speculation.model_drafter import ModelDrafter
from warmline_backend.speculation.pass_costs import DraftOffer, PassCosts, StepCosts
from warmline_backend.speculation.speculation import GrammarSource, Speculation
from warmline_backend.structured_output.matcher import Matcher

CONTEXT_TOKENS = 3  # before a token that is guessed


class AnyLengthCosts(StepCosts):
    """Costs by which the best draft has any length, but for widths of passes that are not allowed."""

    def __init__(self, chance: random.Random, widths: Container[int] = range(33)) -> None:
        super().__init__(PassCosts({1: 1.0}), learns=False)
        self._chance, self._widths = chance, widths

    def choose_length(self, known: int, offers: Sequence[DraftOffer], sequences: int, *, by_model: bool = False) -> int:
        longest = max((offer.length for offer in offers), default=0)
        length = min(longest, self._chance.randrange(12), 32 - known)
        return max((n for n in range(1, length + 1) if known + n in self._widths), default=0)


class FixedSpeculation(Speculation):
    """Speculation by given costs alone: how long steps take here changes nothing."""

    def __init__(self, costs: PassCosts, model: ModelDrafter | None = None) -> None:
        super().__init__(costs, model)
        self.costs = StepCosts(costs, learns=False)


class EarlierTokens:
    """Tokens that followed others in any text of a process, so that a request made again is foreseen."""

    def __init__(self) -> None:
        self._following: dict[tuple[int, ...], int] = {}

    def learn(self, tokens: Sequence[int]) -> None:
        for end in range(CONTEXT_TOKENS, len(tokens)):
            self._following[tuple(tokens[end - CONTEXT_TOKENS : end])] = tokens[end]

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        known = list(tokens[-CONTEXT_TOKENS:])
        guessed: list[int] = []
        while len(guessed) < most and (token := self._following.get(tuple(known))) is not None:
            guessed.append(token)
            known = [*known[1:], token]
        return guessed


class EarlierTokensSource:
    """Source of tokens that were seen earlier; `corruption` is the share that is replaced by any others."""

    def __init__(self, earlier: EarlierTokens, chance: random.Random, corruption: float, vocabulary: int) -> None:
        self._earlier, self._chance, self._corruption, self._vocabulary = earlier, chance, corruption, vocabulary

    def propose(self, history: TokenHistory, most: int) -> Draft | None:
        tokens = history.ids.tolist()
        self._earlier.learn(tokens)
        guessed = self._earlier.guess(tokens, most) or [0]
        return Draft([self._corrupt(token) for token in guessed], PROMPT_LOOKUP, 2)

    def rewind(self, history: TokenHistory) -> None:
        pass

    def _corrupt(self, token: int) -> int:
        return self._chance.randrange(self._vocabulary) if self._chance.random() < self._corruption else token


def check_cancelled_answer(
    served: ServedModel,
    reference: ServedModel,
    prompt: list[int],
    plain: list[int],
    speculation: Speculation,
    steps: int,
) -> None:
    """Cancel an answer after some steps: it keeps the rows of its tokens, and the next turn continues them.

    `plain`: the answer of single steps.  `reference`: the model that computes the next turn cold.
    """
    driver = SchedulerDriver(served, speculation=speculation)
    name, log = driver.submit(prompt, len(plain))
    for _ in range(steps):
        driver.step()
    driver.scheduler.cancel(name)
    kv = driver.scheduler.residents.find_kv(log.result.resident)
    assert log.generated == plain[: len(log.generated)] == log.tokens
    assert kv is not None and kv.tokens == [*prompt, *log.generated]
    following = [*prompt, *log.generated, 7, 8, 9]
    warm = driver.run(following, 5, resident=log.result.resident, reuse=kv.length)
    assert warm.tokens == SchedulerDriver(reference).run(following, 5).tokens


class EagerSpeculation(Speculation):
    """Speculation that drafts at each step, whatever it costs."""

    def __init__(
        self,
        earlier: EarlierTokens | None = None,
        *,
        corruption: float = 0.1,
        seed: int = 1,
        widths: Container[int] = range(33),
    ) -> None:
        super().__init__(None)
        self._earlier, self._corruption, self._chance = earlier or EarlierTokens(), corruption, random.Random(seed)
        self.costs = AnyLengthCosts(self._chance, widths)

    def make_drafter(
        self, prompt: Sequence[int], prediction: Sequence[int], matcher: Matcher | None, ends: Container[int]
    ) -> Drafter:
        guesses = EarlierTokensSource(self._earlier, self._chance, self._corruption, 250)
        sources: list[DraftSource] = [GrammarSource(matcher), guesses] if matcher is not None else [guesses]
        count_valid = len if matcher is None else matcher.count_valid
        return Drafter(prompt, sources, Acceptance(), ends, count_valid)
