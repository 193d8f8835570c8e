"""llguidance's JSON grammars: their options, and the problem that no schema can be forced with.  Pure."""

from typing import Any

from warmline_backend.request.schemas import Schema

# The spacing that models write most in one line; free spacing would let a model write spaces without end.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

UNSATISFIABLE = "no text can match it"  # a grammar's problem, for people


def add_guidance_options(schema: Schema, **options: Any) -> dict[str, Any]:
    """Add llguidance's options at the root."""
    return {**schema, "x-guidance": {**SPACING, **options}}
