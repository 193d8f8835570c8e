"""Strings under llguidance's grammar of a JSON schema, byte by byte."""

import json

from llguidance import LLMatcher, LLTokenizer

from warmline_backend.structured_output.compiler import PARSER_LIMITS
from warmline_backend.structured_output.json_schema.guidance import add_guidance_options
from warmline_backend.structured_output.json_schema.patterns import ForcedPattern


class ForcedStrings:
    """Strings that llguidance allows under all of some patterns."""

    def __init__(self, forced: ForcedPattern) -> None:
        schema = {"type": "string", "allOf": [{"pattern": pattern} for pattern in forced.patterns]}
        grammar = json.dumps({"grammars": [{"json_schema": add_guidance_options(schema)}]})
        self._matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=PARSER_LIMITS)
        self.is_empty = self._matcher.is_error() and "Unsatisfiable" in self._matcher.get_error()
        assert self.is_empty or not self._matcher.is_error(), self._matcher.get_error()

    def __contains__(self, text: str) -> bool:
        if self.is_empty:
            return False
        matcher, data = self._matcher.deep_copy(), json.dumps(text, ensure_ascii=False).encode()
        return matcher.try_consume_tokens(list(data)) == len(data) and bool(matcher.is_accepting())
