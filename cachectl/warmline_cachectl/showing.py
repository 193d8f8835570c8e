"""How results reach people and programs: as JSON, or as what rich prints."""

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from warmline_cachectl import tables


def show(view: dict[str, Any], for_people: Iterable[Any], as_json: bool) -> None:
    """`view` as JSON, or the other form of it."""
    if as_json:
        print(json.dumps(view, indent=2, default=msgspec.to_builtins))
        return
    console = tables.console()
    for part in for_people:
        console.print(part)
