"""Prompts rendered ahead of their generation.  Event loop thread."""

from collections import OrderedDict
from dataclasses import dataclass, field

from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.request.params import GenerationParams
from warmline_backend.structured_output.constraint import Constraint
from warmline_common.protocol.messages import MessageEnd
from warmline_common.protocol.tokens import TokenArray

PROMPTS_MAX = 4096
PROMPT_TOKENS_MAX = 8_000_000
CHARS_PER_TOKEN = 4  # to weigh grammars


class UnknownPromptError(Exception):
    """The prompt was evicted, or never stored."""


@dataclass(frozen=True)
class StoredPrompt:
    id: str
    endpoint: str
    tokens: TokenArray
    params: GenerationParams
    boundaries: list[int]
    turn_end: int
    messages: list[MessageEnd]
    echo: str = ""  # start of the answer
    constraint: Constraint | None = None  # grammar of the answer
    expected_output: ExpectedOutput = ExpectedOutput()  # noqa: RUF009  frozen
    prediction: TokenArray = field(default_factory=TokenArray)  # that the client expects as the answer

    @property
    def weight_tokens(self) -> int:
        """Weight in tokens: a constraint's grammar may be longer than its prompt."""
        grammar_tokens = len(self.constraint.grammar) // CHARS_PER_TOKEN if self.constraint else 0
        return len(self.tokens) + len(self.prediction) + grammar_tokens


class PromptStore:
    """The latest prompts; the oldest are evicted beyond either limit, never the latest one."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, StoredPrompt] = OrderedDict()
        self.tokens_stored = 0

    def add(self, prompt: StoredPrompt) -> None:
        self._prompts[prompt.id] = prompt
        self.tokens_stored += prompt.weight_tokens
        while len(self._prompts) > 1 and (len(self._prompts) > PROMPTS_MAX or self.tokens_stored > PROMPT_TOKENS_MAX):
            self.tokens_stored -= self._prompts.popitem(last=False)[1].weight_tokens

    def clear(self) -> None:
        """Drop all prompts; their generations are refused as gone, and the proxy renders them again."""
        self._prompts.clear()
        self.tokens_stored = 0

    def get(self, prompt_id: str) -> StoredPrompt:
        """Raises UnknownPromptError."""
        if (prompt := self._prompts.get(prompt_id)) is None:
            raise UnknownPromptError(f"no prompt {prompt_id}: it is too old, or this backend was restarted")
        return prompt
