"""Regular expressions of JSON schemas: ECMA-262's, in Unicode mode, that search a string.  Pure."""

from collections.abc import Callable

import regex

MATCH_TIMEOUT_S = 0.02


class PatternError(ValueError):
    """No regular expression of ECMA-262; says why, for people."""


class CheckTooCostlyError(Exception):
    """A check was ended at its bound, without a result."""


def compile_check(pattern: str) -> Callable[[str], bool]:
    """Compile an expression to a test of strings, which raises CheckTooCostlyError at its time limit."""
    try:
        compiled = regex.compile(pattern, regex.VERSION0)
    except regex.error as error:
        raise PatternError(str(error)) from error

    def search(text: str) -> bool:
        try:
            return compiled.search(text, timeout=MATCH_TIMEOUT_S) is not None
        except TimeoutError as error:
            raise CheckTooCostlyError("a pattern takes too long") from error

    return search
