"""Tokenizer of prompts' texts: where a text begins as an earlier one did, it takes the earlier one's tokens.

They are taken up to the last separator that lies in both texts, and what follows is tokenized by itself
(`added_tokens`).  The tokens are those of the whole text.
"""

import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from warmline_backend.prompt.render_limits import PIECE_CHARS, RenderLimits
from warmline_backend.prompt.tokenization.added_tokens import NO_SEPARATORS, find_separators
from warmline_backend.prompt.tokenization.text_cache import (
    BLOCK_CHARS,
    TokenizedText,
    TokenizedTextCache,
    hash_beginnings,
)
from warmline_backend.prompt.tokenization.tokenizer_process import TokenizerProcessError, tokenize_in_process
from warmline_backend.request.params import BadRequestError
from warmline_common.protocol.tokens import TokenArray, count_common_chars

THREAD_CHARS_MAX = 1_000_000  # more new text is tokenized in a process, which can be ended

Tokens = tuple[TokenArray, Callable[[int], int]]  # ids, and how many of them lie wholly before a character


class TextTokenizer:
    """Tokenizer for any number of threads at once.

    Hugging Face's fast tokenizers may be shared by threads as long as truncation, padding and special tokens stay; they
    set these themselves, lazily, in a first call, which is made here.  Slow ones get a lock.
    """

    def __init__(self, tokenizer: Any) -> None:
        kind, fast = type(tokenizer), bool(tokenizer.is_fast)
        self._tokenizer = tokenizer
        self.lock = nullcontext() if fast else threading.Lock()
        # Some legacy classes rewrite the text in `encode` alone; offsets are then offsets into another text.
        self.has_offsets = fast and kind.encode is PreTrainedTokenizerBase.encode
        tokenizer("a", add_special_tokens=False, verbose=False)
        self._library_tokenizer: Tokenizer | None = None  # where Hugging Face's class adds nothing to it
        self._separators = NO_SEPARATORS
        if self.has_offsets and kind._encode_plus is TokenizersBackend._encode_plus:
            self._library_tokenizer = tokenizer._tokenizer
            self._separators = find_separators(tokenizer._tokenizer)
        self._adds_special_tokens = bool(fast and tokenizer._tokenizer.num_special_tokens_to_add(False))
        self._cache = TokenizedTextCache()

    def clear_cache(self) -> None:
        self._cache.clear()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        with self.lock:
            if self._library_tokenizer is not None:
                ids: list[int] = self._library_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def tokenize_in_pieces(self, text: str, check: Callable[[], None]) -> TokenArray:
        """Token ids of a text that is cut anywhere, which changes tokens beside a cut; `check` is called each time."""
        tokens = TokenArray()
        for start in range(0, len(text), PIECE_CHARS):
            check()
            tokens.extend(self.encode(text[start : start + PIECE_CHARS]))
        return tokens

    def tokenize(
        self,
        text: str,
        limits: RenderLimits,
        root: bytes = b"",
        *,
        tokens_before: int = 0,
        add_special_tokens: bool = False,
    ) -> Tokens:
        """Token ids, and a function from a character to the number of tokens wholly before it.

        `root`: namespace of the texts whose tokens may be taken.  `tokens_before` count towards the limit.  Raises
        PromptTooLongError, RenderCancelledError, BadRequestError.
        """
        if not self.has_offsets:
            limits.check_text(text, self.encode, tokens_before)
            return TokenArray(self.encode(text, add_special_tokens)), lambda _: 0
        if self._separators and not (add_special_tokens and self._adds_special_tokens):
            tokenized = self._tokenize_cached(text, limits, root, tokens_before)
        else:
            tokenized = self._tokenize_whole(text, limits, tokens_before, add_special_tokens)
        ends = tokenized.ends
        return tokenized.ids, lambda offset: bisect_right(ends, offset) if offset else 0

    def _tokenize_cached(self, text: str, limits: RenderLimits, root: bytes, tokens_before: int) -> TokenizedText:
        hashes = hash_beginnings(root, text)
        known = self._cache.find(hashes)
        if known is not None and known.text == text:
            return known
        shared = count_common_chars(known.text, text) if known else 0
        count, start = self._find_split(known, shared) if known else (0, 0)
        rest = self._tokenize_whole(text[start:], limits, tokens_before + count)
        if known is None or not count:
            ids, ends = rest.ids, rest.ends
        else:
            ids, ends = known.ids[:count] + rest.ids, known.ends[:count]
            ends.extend(start + end for end in rest.ends)
        tokenized = TokenizedText(text, ids, ends, hashes)
        if hashes:
            # A turn's text goes on where the last one had the generation prompt.
            self._cache.add(tokenized, known if known and len(known.text) - shared <= BLOCK_CHARS else None)
        return tokenized

    def _find_split(self, known: TokenizedText, shared: int) -> tuple[int, int]:
        """Find the last separator within the shared characters: tokens and characters before it."""
        separators, ids, ends = self._separators, known.ids, known.ends
        for index in range(bisect_right(ends, shared) - 1, 0, -1):
            # The model may have ids of added tokens for other texts, as for unknown ones.
            if (content := separators.texts.get(ids[index])) is not None:
                start = ends[index] - len(content)
                if start + separators.chars_max <= shared and known.text.startswith(content, start):
                    return index, start
        return 0, 0

    def _tokenize_whole(
        self, text: str, limits: RenderLimits, tokens_before: int, add_special_tokens: bool = False
    ) -> TokenizedText:
        limits.check_text(text, self.encode, tokens_before)
        if len(text) > THREAD_CHARS_MAX:
            return self._tokenize_in_process(text, limits, add_special_tokens)
        if self._library_tokenizer is not None:
            encoding = self._library_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).encodings[0]
        return TokenizedText(
            text, TokenArray(encoding.ids), array("I", accumulate((end for _, end in encoding.offsets), max))
        )

    def _tokenize_in_process(self, text: str, limits: RenderLimits, add_special_tokens: bool) -> TokenizedText:
        kill_on_cancel = limits.cancellation.kill_on_cancel
        try:
            ids, ends = tokenize_in_process(self._tokenizer._tokenizer, text, add_special_tokens, kill_on_cancel)
        except (TokenizerProcessError, OSError) as error:
            fault = f"the process that tokenizes {len(text)} characters has failed: {error}; shorten the prompt"
            raise BadRequestError(fault) from error
        return TokenizedText(text, TokenArray(ids), ends)
