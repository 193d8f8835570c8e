"""Names of a client's fields and headers that look misspelt.  Pure."""

import difflib
from collections.abc import Iterable
from itertools import islice

from warmline_common.process.redaction import is_field_name

SIMILARITY_MIN = 0.8  # of two names, as difflib counts it
NAMES_COMPARED_MAX = 100


def normalize_name(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def find_similar(name: str, known_names: Iterable[str]) -> str | None:
    """The known name that `name` resembles most; None where it resembles none."""
    normalized = {normalize_name(known): known for known in known_names}
    near = difflib.get_close_matches(normalize_name(name), normalized, n=1, cutoff=SIMILARITY_MIN)
    return normalized[near[0]] if near else None


def explain_missing(name: str, given_names: Iterable[str], owner: str) -> str | None:
    """Fault of an object without a field, where one of its first names is that field's, misspelt.

    `owner` is what the object is: "message".
    """
    for given in islice(given_names, NAMES_COMPARED_MAX):
        if given != name and is_field_name(given) and find_similar(given, [name]):
            return f"is missing; this {owner} has '{given}': write it '{name}'"
    return None
