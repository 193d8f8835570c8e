"""Index of a home, and the rows in it that people name by an id or its beginning."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import msgspec

from warmline_cachectl import client
from warmline_cachectl.errors import EXIT_FOUND, EXIT_USAGE, exit_on_error, fail
from warmline_cachectl.options import make_home
from warmline_proxy.index.index import IndexReader
from warmline_proxy.store.rows import IndexSnapshot

ID_PREFIX_MIN = 4
NEAR_COUNT_MAX = 3


class AmbiguousIdError(Exception):
    """Several ids begin with the typed text."""


@contextmanager
def open_index(path: Path) -> Iterator[IndexReader]:
    """Reader of the index in the home at `path`; errors end the command, as in `exit_on_error`."""
    with exit_on_error(), client.open_reader(make_home(path)) as reader:
        yield reader


def resolve_id(snapshot: IndexSnapshot, typed: str) -> tuple[str, str]:
    """("session", "segment", "checkpoint" or "quarantined", full id) of an id or its beginning, or the command ends."""
    try:
        kind, row_id = find_id(snapshot, typed)
    except AmbiguousIdError as error:
        fail(str(error), EXIT_USAGE)
    if not kind:
        fail(_describe_unknown_id(snapshot, typed), EXIT_USAGE if len(typed) < ID_PREFIX_MIN else EXIT_FOUND)
    return kind, row_id


def resolve_session_id(snapshot: IndexSnapshot, typed: str) -> str:
    """Full id of a session; "" for "".  Ends the command where there is none."""
    if not typed:
        return ""
    kind, row_id = resolve_id(snapshot, typed)
    if kind != "session":
        fail(f"{typed} is a {kind}, not a session", EXIT_USAGE)
    return row_id


def select_model(snapshot: IndexSnapshot, model: str) -> IndexSnapshot:
    """Snapshot with one model's rows alone, by the name that they were stored under; all for "".

    Ends the command where there are none.
    """
    if not model:
        return snapshot
    sessions = {row.id: row for row in snapshot.sessions.values() if row.model == model}
    segments = {row.id: row for row in snapshot.segments.values() if row.model == model}
    if not (sessions or segments):
        fail(describe_unknown_model(snapshot, model), EXIT_FOUND)
    return msgspec.structs.replace(
        snapshot,
        segments=segments,
        checkpoints={row.id: row for row in snapshot.checkpoints.values() if row.segment in segments},
        sessions=sessions,
    )


def describe_unknown_model(snapshot: IndexSnapshot, model: str) -> str:
    """Message for a model of which nothing is stored; aliases are such names, too."""
    names = ", ".join(sorted({repr(row.model) for row in snapshot.segments.values()}))
    others = f"; there is data of {names}" if names else ", nor of any other"
    return f"nothing is stored of a model named {model!r}{others}"


def find_id(snapshot: IndexSnapshot, typed: str) -> tuple[str, str]:
    """(kind, full id) for an id or its unique beginning; ("", "") where there is none.  Raises AmbiguousIdError."""
    kinds = _rows_by_kind(snapshot)
    exact = [(kind, typed) for kind, rows in kinds.items() if typed in rows]
    if exact or len(typed) < ID_PREFIX_MIN:
        return exact[0] if exact else ("", "")
    found = [(kind, row_id) for kind, rows in kinds.items() for row_id in rows if row_id.startswith(typed)]
    if len(found) > 1:
        raise AmbiguousIdError(f"{typed} may be any of {', '.join(row_id for _, row_id in found[:5])}")
    return found[0] if found else ("", "")


def _describe_unknown_id(snapshot: IndexSnapshot, typed: str) -> str:
    """Message about an id that names nothing, with near names."""
    if len(typed) < ID_PREFIX_MIN:
        return f"{typed!r} is too short: say an id, or at least its first {ID_PREFIX_MIN} characters"
    called = [row.id for row in snapshot.sessions.values() if typed.lower() in row.client.lower()]
    beginnings = {row_id[: len(typed)]: row_id for rows in _rows_by_kind(snapshot).values() for row_id in rows}
    near = called or [beginnings[each] for each in get_close_matches(typed, beginnings, NEAR_COUNT_MAX)]
    meant = f"; near it: {', '.join(near[:NEAR_COUNT_MAX])}" if near else ""
    return f"nothing stored is called {typed}{meant} (`cachectl ls` lists the conversations)"


def _rows_by_kind(snapshot: IndexSnapshot) -> dict[str, Mapping[str, object]]:
    return {
        "session": snapshot.sessions,
        "segment": snapshot.segments,
        "checkpoint": snapshot.checkpoints,
        "quarantined": snapshot.quarantined,
    }
