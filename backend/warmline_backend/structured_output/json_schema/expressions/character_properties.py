"""Unicode's properties of characters, as far as the engines know them.  Pure."""

from functools import lru_cache
from typing import Literal

import regex
from llguidance import LLMatcher

from warmline_backend.structured_output.json_schema.expressions.nodes import Chars
from warmline_backend.structured_output.json_schema.expressions.writer import (
    confuses_llguidance,
    write_for_llguidance,
    write_for_regex,
)

Support = Literal["exact", "partial", "none"]  # partial: in strings of JSON llguidance may take some characters more

# Properties whose characters differ much between the engines' versions of Unicode.
_CHANGING_PROPERTIES = ("Emoji", "Extended_Pictographic")


@lru_cache(512)
def is_known_property(written: str) -> bool:
    """True for a property, written as an expression has it, that the regex package knows."""
    try:
        regex.compile(write_for_regex(Chars((), (written,))))
    except regex.error:
        return False
    return True


@lru_cache(512)
def find_support(chars: Chars) -> Support:
    """Find what llguidance makes of a set with known properties."""
    compiled = regex.compile(write_for_regex(chars))
    grammar = LLMatcher.grammar_from_regex(write_for_llguidance(chars))
    if chars.ignores_case or LLMatcher.validate_grammar(grammar):
        return "none"
    if any(name in written for written in chars.properties for name in _CHANGING_PROPERTIES):
        return "partial"
    return "partial" if confuses_llguidance(lambda code: compiled.fullmatch(chr(code)) is not None) else "exact"
