"""Token sequences in lexicographic order: those that share the longest prefix with a prompt lie beside its place.

A lookup compares a few sequences of thousands, token by token.  No I/O; one thread.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens

_Key = tuple[bytes, int, str]  # packed tokens, serial number of their owner, its name
_LAST = float("inf")


class PrefixIndex:
    """Names by packed tokens; a name may have several sequences.  Of equal ones the smaller serial comes first."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, tokens: bytes, serial: int, name: str) -> None:
        insort(self._keys, (tokens, serial, name))

    def remove(self, tokens: bytes, serial: int, name: str) -> None:
        """Remove what was added with these values; nothing where it was not."""
        key = (tokens, serial, name)
        at = bisect_left(self._keys, key)
        if self._keys[at : at + 1] == [key]:
            del self._keys[at]

    def iterate_nearest(self, prompt: bytes) -> Iterator[tuple[int, str]]:
        """Yield (count of common tokens, name) of all that share a token, the longest common prefix first."""
        keys, right = self._keys, bisect_left(self._keys, (prompt,))
        left = right - 1
        before, after = self._count_common(left, prompt), self._count_common(right, prompt)
        while before or after:
            if after >= before:
                yield after, keys[right][2]
                right += 1
                after = self._count_common(right, prompt)
            else:
                yield before, keys[left][2]
                left -= 1
                before = self._count_common(left, prompt)

    def iterate_prefixes(self, prompt: bytes) -> Iterator[tuple[int, str]]:
        """Yield (count of tokens, name) of the sequences that the prompt begins with, the longest first."""
        keys, end = self._keys, len(prompt)
        while end > 0:
            at = bisect_right(keys, (prompt[:end], _LAST)) - 1  # after all of these tokens
            if at < 0:
                return
            found = keys[at][0]
            common = count_common_tokens(found, prompt)  # a shorter prefix of the prompt is one of `found`, too
            if common * TOKEN_BYTES < len(found):
                end = common * TOKEN_BYTES
                continue
            for tokens, _, name in keys[bisect_left(keys, (found,)) : at + 1]:  # equal ones
                yield len(tokens) // TOKEN_BYTES, name
            end = len(found) - TOKEN_BYTES

    def _count_common(self, at: int, prompt: bytes) -> int:
        return count_common_tokens(self._keys[at][0], prompt) if 0 <= at < len(self._keys) else 0
