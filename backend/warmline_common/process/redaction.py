"""Redaction of texts for logs: nothing that a client sent stays.  Pure.

Messages put names of fields in single quotes and clients' values in double ones.  A name stays as long as it looks
like one; any other quoted text is replaced by a mark.
"""

import json
import re
from collections.abc import Callable

PLACEHOLDER = "…"
MESSAGE_CHARS_MAX = 500  # of a message
NAME_CHARS_MAX = 40
PARSER_CHARS_MAX = 120

_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.\[\]-]*")
_QUOTED = re.compile(r"(?<!\w)b?'(.*?)(?:'(?!\w)|\Z)")  # not an apostrophe; what was cut off has no end
_CLOSING_QUOTE_PATTERN = re.compile(r""".*(?:'(?!\w)|")""")  # of either kind: the text itself may have the other
# As msgspec names them.
_TYPE_OR_PATH_PATTERN = re.compile(r"\$[\w.\[\]-]*|(?:str|int|float|bool|array|object|null|bytes)(?: \| \w+)*")
_LONG_NUMBER = re.compile(r"\d{13,}")
_PATH_WORD = re.compile(r"v\d|[a-z]+(?:[_.-][a-z]+)*")
PATH_WORD_CHARS_MAX = 24
PATH_WORDS_MAX = 8


def quote_text(text: str) -> str:
    """Text of a client for a message: in double quotes, plain ASCII, on one line."""
    return json.dumps(text)


def escape_unprintable(text: str, line_end: str = "\\n") -> str:
    """Text on one line, unless `line_end` says otherwise: characters that move a terminal's cursor, or read from right
    to left, are spelled out, so that no text can look like a line of its own.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else line_end if each == "\n" else ascii(each)[1:-1] for each in text)


def is_field_name(text: str) -> bool:
    """True where a text looks like the name of a field, `messages[0].content`, and like nothing else."""
    return len(text) <= NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


def redact(text: str, *, keep_names: bool = True) -> str:
    """Message without values; without `keep_names`, names are removed too, since a library may quote anything."""
    text = " ".join(text[:MESSAGE_CHARS_MAX].split())
    text = _redact_between(text, '"', lambda _: False)
    text = _redact_between(text, "`", lambda inner: _TYPE_OR_PATH_PATTERN.fullmatch(inner) is not None)
    return _LONG_NUMBER.sub(PLACEHOLDER, _redact_single_quoted(text, keep_names))


def shorten_parser_message(message: str) -> str:
    """An HTTP parser's message without the bytes that it quotes, which may contain a prompt or a key."""
    words = " ".join(message.split()).partition(": b'")[0].partition(': b"')[0]
    return (redact(words, keep_names=False) if "'" in words or '"' in words else words)[:PARSER_CHARS_MAX]


def redact_path(path: str) -> str:
    """Path of a URL with only the words of an API's paths: other parts may be a key or an id."""
    words = path.split("/")
    shown = [word if _is_path_word(word) else PLACEHOLDER for word in words[: PATH_WORDS_MAX + 1]]
    return "/".join(shown) + ("/" + PLACEHOLDER if len(words) > PATH_WORDS_MAX + 1 else "")


def _is_path_word(word: str) -> bool:
    return len(word) <= PATH_WORD_CHARS_MAX and (not word or _PATH_WORD.fullmatch(word) is not None)


def _redact_between(text: str, mark: str, is_harmless: Callable[[str], bool]) -> str:
    """Text redacted from the first mark to the last, since values may have marks; unless all is harmless."""
    first, last = text.find(mark), text.rfind(mark)
    if first < 0:
        return text
    parts = text.split(mark)
    if len(parts) % 2 and all(is_harmless(inner) for inner in parts[1::2]):
        return text
    return f"{text[:first]}{mark}{PLACEHOLDER}{mark}{text[last + 1 :] if last > first else ''}"


def _redact_single_quoted(text: str, keep_names: bool) -> str:
    for span in _QUOTED.finditer(text):
        if not (keep_names and is_field_name(span[1])):
            end = _CLOSING_QUOTE_PATTERN.match(text, span.end())
            return f"{text[: span.start()]}'{PLACEHOLDER}'{text[end.end() if end else span.end() :]}"
    return text
