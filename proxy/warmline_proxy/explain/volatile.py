"""Volatile text, likely to change with the next request: times, dates, random ids.  Pure.

rule       text                         replacement
times      2026-11-28T14:22:33Z, 14:22  the date, where there is one, and [time]
dates      2026-11-28, Nov 28, 2026     [date]
ids        UUIDs, hashes, req_8Fk2...   [id]
billing    a client's own header line   nothing
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

TIMES, DATES, IDS, BILLING = "times", "dates", "ids", "billing"
TEXT_CHARS_MAX = 1 << 18  # of a text that is searched
NEAR_CHARS = 4096  # searched around the first difference of two texts
ID_CHARS_MIN = 16  # digits and letters mixed: shorter ones are versions, model names, colours

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_ISO_DATE = r"(?:19|20)\d\d-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d{1,9})?)?"
_ZONE = r"(?:\s?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)\b)?"
_SLASHED = r"(?:0?[1-9]|[12]\d|3[01])[/.](?:0?[1-9]|[12]\d|3[01])[/.](?:19|20)\d\d"
_ID = rf"(?=[A-Za-z0-9]*\d)(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{{{ID_CHARS_MIN},64}}"
_HEX = rf"(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{{{ID_CHARS_MIN},128}}"

# At each place the first alternative that matches decides.
_PATTERN = re.compile(
    rf"""
      (?P<billing> ^ x-anthropic-billing-header: [^\n]* \n? )
    | (?P<stamp>   \b (?P<day> {_ISO_DATE} ) [T_\ ] {_CLOCK} {_ZONE} )
    | (?P<clock>   (?<![\d:.]) {_CLOCK} (?: \s? [AaPp]\.?[Mm]\b\.? )? {_ZONE} (?![\d:]) )
    | (?P<epoch>   (?<![\w.]) 1[5-9]\d{{8}} (?: \d{{3}} | \.\d{{1,9}} )? (?![\w.]) )
    | (?P<date>    \b (?: {_ISO_DATE} | {_MONTH}\ {_DAY}(?:st|nd|rd|th)?,?\ (?:19|20)\d\d
                     | {_DAY}\ {_MONTH}\ (?:19|20)\d\d | {_SLASHED} ) \b )
    | (?P<uuid>    \b [0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{12}} \b )
    | (?P<hash>    \b {_HEX} \b )
    | (?P<named>   \b [a-z]{{2,12}} [_-] {_ID} \b )
    """,
    re.VERBOSE | re.MULTILINE,
)
_KINDS = {
    "billing": (BILLING, "a billing header"),
    "stamp": (TIMES, "a time"),
    "clock": (TIMES, "a time of day"),
    "epoch": (TIMES, "a Unix time"),
    "date": (DATES, "a date"),
    "uuid": (IDS, "a UUID"),
    "hash": (IDS, "a hash or random id"),
    "named": (IDS, "a random id"),
}
_REPLACEMENTS = {TIMES: "[time]", DATES: "[date]", IDS: "[id]", BILLING: ""}


@dataclass(frozen=True)
class VolatileSpan:
    """Range text[start:end] that is likely to change."""

    start: int
    end: int
    rule: str  # TIMES, DATES, IDS or BILLING
    description: str  # for users, without the text itself
    replacement: str


def find_volatile_spans(text: str, start: int = 0, end: int = TEXT_CHARS_MAX) -> Iterator[VolatileSpan]:
    """Yield the volatile spans in text[start:end], ascending, without overlaps."""
    for match in _PATTERN.finditer(text, start, end):
        rule, description = next(kind for name, kind in _KINDS.items() if match[name] is not None)
        replacement = f"{match['day']} [time]" if match["stamp"] else _REPLACEMENTS[rule]
        yield VolatileSpan(match.start(), match.end(), rule, description, replacement)


def find_replaced_span(old: str, new: str, at: int) -> VolatileSpan | None:
    """Find the new text's span at the first difference `at`, if the old text has one of its rule there."""
    before = {(span.start, span.rule) for span in _find_spans_at(old, at)}
    return next((span for span in _find_spans_at(new, at) if (span.start, span.rule) in before), None)


def _find_spans_at(text: str, at: int) -> list[VolatileSpan]:
    """Find the spans that contain the place, or end there."""
    far = max(0, at - NEAR_CHARS)
    start = text.rfind("\n", far, at) + 1 or far
    return [span for span in find_volatile_spans(text, start, at + NEAR_CHARS) if span.start <= at <= span.end]


def stabilize_text(text: str, rules: Collection[str]) -> tuple[str, Counter[str]]:
    """Replace the spans of these rules in the first TEXT_CHARS_MAX characters; with the number of changes by rule."""
    parts, at, counts = [], 0, Counter[str]()
    for span in find_volatile_spans(text):
        if span.rule in rules:
            parts += [text[at : span.start], span.replacement]
            at = span.end
            counts[span.rule] += 1
    return "".join([*parts, text[at:]]), counts
