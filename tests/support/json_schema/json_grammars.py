"""Prepared schemas tried out on JSON values, with a tokenizer of bytes."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from warmline_backend.structured_output.compiler import PARSER_LIMITS
from warmline_backend.structured_output.json_schema.guidance import UNSATISFIABLE, add_guidance_options
from warmline_backend.structured_output.json_schema.prepared import PreparedSchema, Trial, prepare_schema
from warmline_backend.structured_output.json_schema.validator import SchemaValidator

Schema = dict[str, Any]


def compile_schema(forced: Schema) -> LLMatcher:
    grammar = json.dumps({"grammars": [{"json_schema": add_guidance_options(forced)}]})
    return LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=PARSER_LIMITS)


def find_problem(forced: Schema, trial: Trial = Trial.PART) -> str:
    matcher = compile_schema(forced)
    error = matcher.get_error().split("\n")[0]
    if not error and not np.frombuffer(matcher.compute_bitmask(), np.uint8).any():
        return UNSATISFIABLE
    return UNSATISFIABLE if error.startswith("Unsatisfiable") else error


def prepare(schema: Schema, strict: bool = True) -> PreparedSchema:
    return prepare_schema(schema, "schema", strict, find_problem)


class PreparedTrial:
    """A prepared schema with its matcher and its validator."""

    def __init__(self, schema: Schema, strict: bool = True) -> None:
        self.prepared = prepare(schema, strict)
        self._matcher = compile_schema(self.prepared.forced)
        self._validator = SchemaValidator(self.prepared.normalized)

    def is_forced(self, value: object) -> bool:
        """True where the grammar accepts a value, in some order of its keys."""
        return any(self._accepts(json.dumps(each, ensure_ascii=False)) for each in _iter_orders(value))

    def is_valid(self, value: object) -> bool:
        """True where an answer may be this value: the grammar accepts it, and the check, if there is one."""
        return self.is_forced(value) and (not self.prepared.checks or self._validator.find_error(value) is None)

    def _accepts(self, text: str) -> bool:
        matcher, tokens = self._matcher.deep_copy(), list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _iter_orders(value: object) -> Iterator[object]:
    if not isinstance(value, dict):
        yield value
        return
    for names in itertools.permutations(value):
        for parts in itertools.product(*(_iter_orders(value[name]) for name in names)):
            yield dict(zip(names, parts, strict=True))
