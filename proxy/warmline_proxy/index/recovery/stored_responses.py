"""Verification and repair of stored responses, which have no other copy: a damaged one is dropped."""

from collections.abc import Iterator

from warmline_proxy.index.responses import insert_response, list_responses, read_body, split_keys
from warmline_proxy.store.row_checks import read_valid_entries
from warmline_proxy.store.rows import IndexFinding
from warmline_proxy.store.tables import DECODERS, Tables


def check_responses(tables: Tables, deep: bool) -> Iterator[IndexFinding]:
    """Each response has a body, and is found by its id alone, and by exactly its items.

    `deep`: bodies are read, too.
    """
    rows = dict(list_responses(tables))
    bodies = {key: len(value) for key, value in tables.items("response_bodies")}
    ids = dict(tables.items("response_ids"))
    for key, row in rows.items():
        if bodies.get(key) != row.bytes_body or (deep and read_body(tables, key) is None):
            yield _finding(row.id, "its text is missing or damaged")
        if ids.get(split_keys(row)[0]) != key:
            yield _finding(row.id, "is not found by its id")
    if bodies.keys() - rows.keys() or len(ids) != len(rows):
        yield _finding("", f"{len(bodies)} texts and {len(ids)} ids for {len(rows)} responses")
    held = {item + key for key, row in rows.items() for item in split_keys(row)[1]}
    if wrong := held.symmetric_difference(key for key, _ in tables.items("holders")):
        yield _finding("", f"{len(wrong)} items are looked for in responses without them, or are not found in theirs")


def copy_responses(tables: Tables, draft: Tables) -> None:
    """Copy the responses that can be read whole, the newest one of each id."""
    rows = {key: DECODERS["responses"](value) for key, value in sorted(read_valid_entries(tables, "responses").items())}
    newest = {split_keys(row)[0]: key for key, row in rows.items()}
    for key, row in rows.items():
        body = tables.get("response_bodies", key)
        is_whole = body is not None and len(body) == row.bytes_body and read_body(tables, key) is not None
        if body is not None and is_whole and newest[split_keys(row)[0]] == key:
            insert_response(draft, key, row, body)


def _finding(item_id: str, detail: str) -> IndexFinding:
    return IndexFinding(what="response", id=item_id, detail=detail)
