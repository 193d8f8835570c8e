"""Cache of the ends of rendered beginnings of conversations, so that a turn renders its new messages' alone.

A beginning is known by a hash of its messages, and the text that it renders to by its length and hash: no text is kept.
A wrong end would cost an unused checkpoint, and nothing else, since prompts are compared by their tokens.
"""

import marshal
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import xxhash

from warmline_backend.prompt.template_traits import Message

ENDS_MAX = 16_384  # a few hundred bytes each
MARSHAL_VERSION = 2  # later ones write an object that is shared otherwise than one that is not


@dataclass(frozen=True)
class RenderedEnd:
    """Length and hash of a rendered beginning."""

    chars: int
    digest: bytes


class MessageEndCache:
    """Ends by the hash of their messages; the least recently used are dropped.  Any thread."""

    def __init__(self) -> None:
        self._ends: OrderedDict[bytes, RenderedEnd] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: bytes) -> RenderedEnd | None:
        with self._lock:
            if key in self._ends:
                self._ends.move_to_end(key)
            return self._ends.get(key)

    def add(self, key: bytes, end: RenderedEnd) -> None:
        with self._lock:
            self._ends[key] = end
            while len(self._ends) > ENDS_MAX:
                self._ends.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._ends.clear()


def hash_messages(root: bytes, options: Any, messages: list[Message]) -> list[bytes]:
    """Hash of the beginning of each number of messages, from 0, rendered with these options; JSON values all."""
    hasher = xxhash.xxh3_128(root + marshal.dumps(options, MARSHAL_VERSION))
    keys = [hasher.digest()]
    for message in messages:
        hasher.update(marshal.dumps(message, MARSHAL_VERSION))
        keys.append(hasher.digest())
    return keys


class TextHasher:
    """Hasher of a text's beginnings; ascending lengths cost one pass."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._hasher, self._hashed = xxhash.xxh3_128(), 0

    def hash_beginning(self, chars: int) -> bytes:
        if chars < self._hashed:
            self._hasher, self._hashed = xxhash.xxh3_128(), 0
        self._hasher.update(self._text[self._hashed : chars].encode())
        self._hashed = chars
        return self._hasher.digest()

    def begins_with(self, end: RenderedEnd) -> bool:
        return end.chars <= len(self._text) and self.hash_beginning(end.chars) == end.digest


def describe_text(text: str) -> RenderedEnd:
    return RenderedEnd(len(text), TextHasher(text).hash_beginning(len(text)))
