"""Difference of two texts, as ranges of characters for display.  Pure."""

import re
from difflib import SequenceMatcher
from itertools import accumulate

from warmline_common.protocol.tokens import count_common_chars

SIMILARITY_MIN = 0.3  # of the shorter text's letters; less similar texts are marked whole
_WORD = re.compile(r"\w+|\s+|(?P<sign>.)(?P=sign)*", re.DOTALL)  # a line of dashes is one word

Ranges = list[tuple[int, int]]  # [start, end) in characters, ascending


def diff_texts(old: str, new: str) -> tuple[Ranges, Ranges]:
    """Find the different ranges of each text; text that only one has at its end, as a longer window, does not count."""
    at = count_common_chars(old, new)
    while at and any(_is_same_word(text[at - 1], text[at : at + 1]) for text in (old, new)):
        at -= 1  # to mark whole words, and whole lines of signs
    words = [[found[0] for found in _WORD.finditer(text, at)] for text in (old, new)]
    matcher = SequenceMatcher(None, words[0], words[1])  # with its junk heuristic: else it takes minutes
    # Letters alone are counted: spaces and signs are in every text.
    same = sum(_count_letters(words[0][block.a : block.a + block.size]) for block in matcher.get_matching_blocks())
    if same / max(1, min(map(_count_letters, words))) < SIMILARITY_MIN:
        return [(at, len(old))] * (len(old) > at), [(at, len(new))] * (len(new) > at)
    offsets = [list(accumulate(map(len, each), initial=at)) for each in words]
    codes = matcher.get_opcodes()
    if len(codes) > 2 and codes[-1][0] in ("insert", "delete") and codes[-2][0] == "equal":
        codes.pop()  # one text ends earlier
    changes = [places for tag, *places in codes if tag != "equal"]
    old_ranges = [(offsets[0][start], offsets[0][end]) for start, end, _, _ in changes if start < end]
    return old_ranges, [(offsets[1][start], offsets[1][end]) for _, _, start, end in changes if start < end]


def _is_same_word(a: str, b: str) -> bool:
    return (a.isalnum() and b.isalnum()) or (a == b and not a.isspace())


def _count_letters(words: list[str]) -> int:
    return sum(len(word) for word in words if word[0].isalnum())
