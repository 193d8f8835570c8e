"""Verdict on an instance by jsonschema, for the schema's own draft: valid, invalid, or invalid by a format alone."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import jsonschema
import regex
from jsonschema import _keywords, _legacy_keywords, _utils, validators
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator

DRAFTS = {
    "3": jsonschema.Draft3Validator,
    "4": jsonschema.Draft4Validator,
    "6": jsonschema.Draft6Validator,
    "7": jsonschema.Draft7Validator,
    "2019-09": jsonschema.Draft201909Validator,
}
BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
SPACES = "\\t-\\r \\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff"


@dataclass(frozen=True)
class Verdict:
    is_valid: bool
    formats: tuple[str, ...] = ()  # not followed, where nothing else is wrong
    reason: str = ""


class UnusualJsonError(ValueError):
    """JSON that parsers read in different ways: an object has a key twice, or a number is too large for a double."""


class Judge:
    """Validator of one schema.  Raises SchemaError, or another error of jsonschema's, for one that it can't use."""

    def __init__(self, schema: Any) -> None:
        draft = _get_class(_find_draft(schema))
        self._plain: Validator = draft(schema)
        self._strict: Validator = draft(schema, format_checker=draft.FORMAT_CHECKER)

    def judge(self, instance: Any) -> Verdict:
        if (error := next(iter(self._plain.iter_errors(instance)), None)) is not None:
            return Verdict(False, (), f"{error.json_path}: {error.validator}: {error.message}"[:300])
        errors = self._strict.iter_errors(instance)
        formats = {
            part.validator_value for error in errors for part in _iter_leaves(error) if part.validator == "format"
        }
        return Verdict(True, tuple(sorted(map(str, formats))))


def parse_answer(text: str) -> Any:
    """Parse an answer.  Raises UnusualJsonError, or another ValueError."""
    return json.loads(text, object_pairs_hook=_make_object, parse_float=_make_float)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) < len(pairs):
        raise UnusualJsonError("an object has a key twice")
    return made


def _make_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise UnusualJsonError("a number is too large for a double")
    return value


def _iter_leaves(error: ValidationError) -> Iterator[ValidationError]:
    yield error
    for inner in error.context or ():
        yield from _iter_leaves(inner)


def _find_draft(schema: Any) -> str:
    """Draft by "$schema", however its address is written; "" for the newest."""
    address = str(schema.get("$schema", "")) if isinstance(schema, Mapping) else ""
    found = re.search(r"draft-?0?([3467])\b|draft/(2019-09)", address)
    return next(filter(None, found.groups())) if found else ""


@lru_cache
def _get_class(draft: str) -> Any:
    """Class of a draft, with multiples of decimal numbers, and boolean bounds of draft 4 in any draft."""
    base = DRAFTS.get(draft, jsonschema.Draft202012Validator)
    changed = {"multipleOf": _check_multiple, "divisibleBy": _check_multiple}
    if draft not in ("3", "4"):
        changed |= {key: partial(_check_bound, key, base.VALIDATORS[key]) for key in BOUNDS}
    made = validators.extend(base, {key: check for key, check in changed.items() if key in base.VALIDATORS})
    made.FORMAT_CHECKER = base.FORMAT_CHECKER
    return made


def _check_bound(
    key: str, check: Callable[..., Any], validator: Any, bound: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(bound, bool):
        yield from check(validator, bound, instance, schema) or ()
    elif bound and validator.is_type(instance, "number") and instance == schema.get(BOUNDS[key]):
        yield ValidationError(f"{instance!r} is the bound itself")


@lru_cache(4096)
def compile_pattern(pattern: str) -> Any:
    """Compile a pattern of ECMA-262: "$" is the end of the text, \\d and \\w are ASCII, \\s is not."""
    words = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]|\$", _translate_pattern_part, pattern)
    words = re.sub(r"\(\?<(?![=!])", "(?P<", words).replace("\\/", "/")
    words = re.sub(r"\\u\{([0-9a-fA-F]+)\}", lambda part: re.escape(chr(int(part[1], 16))), words)
    try:
        return re.compile(words, re.ASCII)
    except re.error:
        return regex.compile(words)


def _translate_pattern_part(part: re.Match[str]) -> str:
    """Translate an escape, a class, or a dollar sign."""
    text = part[0]
    if text.startswith("["):
        return re.sub(r"\\[sS]|\\.", lambda escape: SPACES if escape[0] == r"\s" else escape[0], text)
    return {"$": r"\Z", r"\s": f"[{SPACES}]", r"\S": f"[^{SPACES}]"}.get(text, text)


class EcmaPatterns:
    """Stands where jsonschema has the module `re`, so that all its keywords read patterns alike."""

    @staticmethod
    def search(pattern: str, text: str) -> Any:
        return compile_pattern(pattern).search(text)


_keywords.re = _legacy_keywords.re = _utils.re = EcmaPatterns  # type: ignore[attr-defined]


def _check_multiple(_validator: Any, step: Any, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, int | float) or isinstance(instance, bool) or not math.isfinite(instance):
        return
    if Fraction(str(instance)) % Fraction(str(step)):
        yield ValidationError(f"{instance!r} is not a multiple of {step!r}")
