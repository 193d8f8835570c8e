r"""Halves of surrogate pairs, which JSON can spell (`\ud83d`) and no text has: each is replaced by U+FFFD.  Pure.

A client writes one where it has cut a text inside a character beyond U+FFFF, as JavaScript's strings allow.
"""

import re

_REPLACEMENT = "\ufffd"
_HALF = re.compile("[\ud800-\udfff]")
# All escapes are matched, so that an escaped backslash before "u" is none.
_ESCAPE = re.compile(
    rb"\\(?:u[dD]([89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})|.)", re.S
)


def replace_halves(text: str) -> str:
    """Replace each half in a text; other texts are returned as they are."""
    if text.isascii():  # known without a look at it
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF.sub(_REPLACEMENT, text)
    return text


def replace_escaped_halves(data: bytes) -> bytes:
    """Replace each half that JSON spells as an escape, in values and in keys."""
    return _ESCAPE.sub(_replace_half, data)


def _replace_half(escape: "re.Match[bytes]") -> bytes:
    is_half = escape[1] is not None and escape[2] is None
    return rb"\ufffd" if is_half else escape[0]
