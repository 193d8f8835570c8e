"""Unicode's properties of characters, as far as the engines know them.  Pure."""

from functools import lru_cache
from typing import Literal

import regex
from llguidance import LLMatcher

from warmline_backend.structured_output.json_schema.expressions.nodes import Chars, PatternError
from warmline_backend.structured_output.json_schema.expressions.writer import (
    confuses_llguidance,
    write_for_llguidance,
    write_for_regex,
)

Support = Literal["exact", "partial", "none"]  # partial: llguidance may take some characters more


@lru_cache(512)
def find_support(chars: Chars) -> Support:
    """Find what llguidance makes of a set with properties.  Raises PatternError for an unknown property."""
    try:
        compiled = regex.compile(write_for_regex(chars))
    except regex.error as error:
        raise PatternError(f"it has an unknown property in {''.join(chars.properties)[:60]!r}") from error
    grammar = LLMatcher.grammar_from_regex(write_for_llguidance(chars))
    if chars.ignores_case or LLMatcher.validate_grammar(grammar):
        return "none"
    return "partial" if confuses_llguidance(lambda code: compiled.fullmatch(chr(code)) is not None) else "exact"
