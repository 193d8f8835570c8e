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
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        partial = next((start for start in starts if text[start:] in self._prefixes), len(text))
        match = self._find(text) if self._find else None
        if match is None or match.start() > partial:
            return partial, ""
        return match.start(), match.group()
