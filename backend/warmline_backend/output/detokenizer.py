"""Token ids to text, token by token: nothing is emitted that the next token could change."""

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

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


class TokenBytes:
    """Bytes of single tokens, which may be half a character.  Any thread."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet() if isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer) else {}
        # A token by itself may lose a space at its beginning, so it is decoded after another one.
        self._anchor = list(tokenizer.encode("x", add_special_tokens=False))[-1:]
        self._anchor_text = decode_tokens(tokenizer, self._anchor)

    def decode(self, token: int, *, begins_text: bool = False) -> bytes:
        """Bytes of a token within a text, or at its beginning; U+FFFD's for bytes that can't be found."""
        before, skipped = ([], 0) if begins_text else (self._anchor, len(self._anchor_text))
        text = decode_tokens(self._tokenizer, [*before, token])[skipped:]
        return text.encode() if "\ufffd" not in text else self._find_bytes(token) or text.encode()

    def _find_bytes(self, token: int) -> bytes | None:
        """Bytes of a token of a vocabulary of bytes; None for another one."""
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if self._byte_of.keys() >= set(piece):
            return bytes(self._byte_of[char] for char in piece)
        if piece.startswith("<0x") and len(piece) == 6:  # byte fallback of SentencePiece vocabularies
            return bytes.fromhex(piece[3:5])
        return None

    def remove_incomplete(self, text: str, tokens: Sequence[int]) -> str:
        """Remove an incomplete character from the end of these tokens' text, which ends with U+FFFD."""
        found = [self._find_bytes(token) for token in tokens]
        if None in found:
            return text.rstrip("\ufffd")
        decoder = getincrementaldecoder("utf-8")("replace")
        whole = decoder.decode(b"".join(filter(None, found)))
        return whole if decoder.getstate()[0] else text  # else the model has generated U+FFFD, or noise


get_token_bytes = lru_cache(maxsize=8)(TokenBytes)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 stands for itself, the rest is moved to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


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
        self._decode, self._token_bytes = partial(decode_tokens, tokenizer), get_token_bytes(tokenizer)
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
        """Return the rest, without a character that is not complete.

        U+FFFD in its place would be no text of the model's, and an answer that goes on would not complete it.
        """
        text, tokens, self._pending = self._decode_pending(), self._pending, []
        return self._token_bytes.remove_incomplete(text, tokens) if text.endswith("\ufffd") else text

    def copy(self) -> "Detokenizer":
        made = copy(self)
        made._context, made._pending = [*self._context], [*self._pending]
        return made

    def _decode_pending(self) -> str:
        emitted = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending)[len(emitted) :]
