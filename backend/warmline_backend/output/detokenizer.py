"""Token ids to text, token by token: nothing is emitted that the next token could change."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

_PENDING_TOKENS_MAX = 16  # no character needs as many; more is noise that never becomes valid UTF-8


def decode_tokens(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> str:
    """Text of all tokens, special ones included.  Any thread."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def render_echo(body: Mapping[str, Any], tokens: Sequence[int], tokenizer: TokenizerWrapper) -> str:
    """Prompt of a completion with `echo`: as it was sent, or the text of the token ids that were sent.

    `body` was rendered to `tokens`, so its prompt is a text, a list of ids, or a list of one of these.
    """
    prompt = body["prompt"]
    if isinstance(prompt, list) and isinstance(prompt[0], str):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else decode_tokens(tokenizer, tokens)


class StopWordFilter:
    """Content up to the first complete stop word.  Not thread-safe; one a request.

    Aho and Corasick's automaton: a character takes the same time whatever the number and the length of the words, and
    no more is held than the longest end of the text that begins a word.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._root = self._node = _build_automaton(words)
        self._held = ""  # beginning of a word
        self.is_stopped = False  # a stop word is complete; neither that nor later text is emitted
        self.stop_word = ""  # the complete stop word

    def add(self, text: str) -> str:
        """Add text; returns what can't begin a stop word."""
        if self.is_stopped:
            return ""
        node, pending = self._node, self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            while char not in node.children and node.fallback is not None:
                node = node.fallback
            node = node.children.get(char, self._root)
            if node.word:
                self.is_stopped, self.stop_word = True, node.word
                return pending[: end - len(node.word)]
        self._node, emitted = node, len(pending) - node.depth
        self._held = pending[emitted:]
        return pending[:emitted]

    def flush(self) -> str:
        """Return held text, once it can't become a stop word any more."""
        held, self._held, self._node = self._held, "", self._root
        return "" if self.is_stopped else held


@dataclass(eq=False, slots=True)
class _AutomatonNode:
    """The beginning of a stop word."""

    depth: int  # its characters
    word: str = ""  # the longest stop word that is complete here
    fallback: "_AutomatonNode | None" = None  # its longest end that is the beginning of a word, too; None: the root
    children: "dict[str, _AutomatonNode]" = field(default_factory=dict)


def _build_automaton(words: Sequence[str]) -> _AutomatonNode:
    """Build the automaton, and return its root."""
    root = _AutomatonNode(0)
    for word in words:
        node = root
        for char in word:
            node = node.children.setdefault(char, _AutomatonNode(node.depth + 1))
        node.word = word
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        for char, child in node.children.items():
            fallback = node.fallback
            while fallback is not None and char not in fallback.children:
                fallback = fallback.fallback
            child.fallback = fallback.children[char] if fallback is not None else root
            child.word = child.word or child.fallback.word
            waiting.append(child)
    return root


class Detokenizer:
    """Decoding with a window over the last tokens, so that each step costs the same.

    mlx-lm's streaming detokenizers drop the leading space of an answer.  A client sends the answer back with its next
    turn, and only the exact text becomes the same tokens again.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._decode = partial(decode_tokens, tokenizer)
        self._context: list[int] = []  # tokens already emitted, kept because they decide how the next ones join
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode_pending()
        if not text or (text.endswith("\ufffd") and len(self._pending) < _PENDING_TOKENS_MAX):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text, self._pending = self._decode_pending(), []
        return text

    def _decode_pending(self) -> str:
        emitted = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending)[len(emitted) :]
