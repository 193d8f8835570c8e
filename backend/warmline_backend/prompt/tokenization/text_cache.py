"""Cache of tokenized texts, found for texts that begin alike.  Any thread.

A text is known by hashes of its beginnings: one each `BLOCK_CHARS` characters, and one of it all.  A hash finds a text;
the caller compares the texts themselves.  Texts of one root are not found for another's: the time of a rendering must
not tell a tenant what others send.
"""

import sys
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from warmline_common.protocol.tokens import TOKEN_BYTES, TokenArray

BLOCK_CHARS = 4096
TEXT_CHARS_MIN = 128  # a shorter one is tokenized about as soon as it is found
TEXTS_MAX = 16_384
TEXTS_BYTES_MAX = 128 << 20
_TEXT_BYTES, _HASH_BYTES = 1024, 128  # of Python's objects for each, about


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text, its token ids, and for each token the end of the characters up to there.  The arrays are not changed."""

    text: str
    ids: TokenArray
    ends: "array[int]"
    hashes: tuple[bytes, ...] = ()  # of its beginnings, ascending

    @property
    def nbytes(self) -> int:
        arrays = TOKEN_BYTES * (len(self.ids) + len(self.ends))
        return sys.getsizeof(self.text) + arrays + _HASH_BYTES * len(self.hashes) + _TEXT_BYTES


def hash_beginnings(root: bytes, text: str) -> tuple[bytes, ...]:
    """Hashes of a text's beginnings, by which it is found; none for a text that is too short."""
    if len(text) < TEXT_CHARS_MIN:
        return ()
    hasher, hashes = xxhash.xxh3_128(root), []
    for start in range(0, len(text), BLOCK_CHARS):
        hasher.update(text[start : start + BLOCK_CHARS].encode())
        hashes.append(hasher.digest())
    return tuple(hashes)


class TokenizedTextCache:
    """Texts, of which the least recently used are dropped beyond either limit."""

    def __init__(self, texts_max: int = TEXTS_MAX, bytes_max: int = TEXTS_BYTES_MAX) -> None:
        self._texts_max, self._bytes_max = texts_max, bytes_max
        self._texts: OrderedDict[bytes, TokenizedText] = OrderedDict()  # by the hash of all of it
        self._latest: dict[bytes, TokenizedText] = {}  # by each of its hashes
        self._lock = threading.Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, hashes: tuple[bytes, ...]) -> TokenizedText | None:
        """Find the latest text with the longest beginning that a text of these hashes shares with any."""
        with self._lock:
            found = next((text for key in reversed(hashes) if (text := self._latest.get(key))), None)
            if found is not None:
                self._texts.move_to_end(found.hashes[-1])
            return found

    def add(self, text: TokenizedText, replaced: TokenizedText | None = None) -> None:
        """Add a text that has hashes, in the place of `replaced`, whose rest nobody will ask for."""
        with self._lock:
            for key in (text.hashes[-1], *(replaced.hashes[-1:] if replaced else ())):
                self._remove(key)
            self._texts[text.hashes[-1]] = text
            self._latest.update(dict.fromkeys(text.hashes, text))
            self.nbytes += text.nbytes
            while len(self._texts) > self._texts_max or self.nbytes > self._bytes_max:
                self._remove(next(iter(self._texts)))

    def clear(self) -> None:
        with self._lock:
            self._texts.clear()
            self._latest.clear()
            self.nbytes = 0

    def _remove(self, key: bytes) -> None:
        if (text := self._texts.pop(key, None)) is None:
            return
        self.nbytes -= text.nbytes
        for each in text.hashes:
            if self._latest.get(each) is text:
                del self._latest[each]
