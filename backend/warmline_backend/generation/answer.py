"""Tokens of one answer as it stands: first those sent to the client, then those held.  Engine thread."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from warmline_backend.generation.events import SampledLogprobs


@dataclass(frozen=True, slots=True)
class AnswerToken:
    id: int
    logprobs: SampledLogprobs | None
    is_end: bool  # ends the answer, and has no text


@dataclass(eq=False)
class Answer:
    """An answer: sent tokens stay, held ones may be drawn again."""

    token_count: int = 0
    sent_count: int = 0
    _held: list[AnswerToken] = field(default_factory=list)

    def add(self, token: AnswerToken) -> None:
        self._held.append(token)
        self.token_count += 1

    def take(self, count: int) -> Iterator[AnswerToken]:
        """Send tokens until `count` of the answer are sent; yields each once it counts as sent."""
        sent_now = max(0, count - self.sent_count)
        sent, self._held = self._held[:sent_now], self._held[sent_now:]
        for token in sent:
            self.sent_count += 1
            yield token

    def rewind(self, count: int) -> None:
        """Drop all but the first `count` tokens, which include those sent."""
        assert count >= self.sent_count
        del self._held[count - self.sent_count :]
        self.token_count = count
