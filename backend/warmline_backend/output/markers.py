"""Search for markers in text that comes in pieces."""

import re
from collections.abc import Iterable


class MarkerScanner:
    """Search for the first of some markers; where one begins with another, the shorter counts.  Stateless."""

    def __init__(self, markers: Iterable[str]) -> None:
        ordered = sorted(set(markers) - {""}, key=len)
        self._find = re.compile("|".join(map(re.escape, ordered))).search if ordered else None
        self._prefixes = frozenset(marker[:length] for marker in ordered for length in range(1, len(marker)))
        self._longest = max(map(len, ordered), default=1)

    def find_marker(self, text: str) -> tuple[int, str]:
        """Length of the text that precedes all markers, whatever follows, and the marker there, if complete."""
        begun = self._find_partial(text)
        match = self._find(text) if self._find else None
        if match is None or match.start() > begun:
            return begun, ""
        return match.start(), match.group()

    def _find_partial(self, text: str) -> int:
        """Start of a marker that the text ends within."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)
