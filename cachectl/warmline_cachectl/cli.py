"""`cachectl`: look at what is stored, check it, remove it.

Exit codes: 0 fine, 1 findings or nothing matched, 2 usage or no home, 3 refused (in use, or the proxy said no).
"""

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from warmline_cachectl import client, tables, views
from warmline_proxy.index import IndexFailure, IndexReader
from warmline_proxy.purge import select, told
from warmline_proxy.rows import Finding, PurgeReply, PurgeRequest, ReplayRequest, Snapshot
from warmline_wire.home import Home

EXIT_OK, EXIT_FOUND, EXIT_USAGE, EXIT_REFUSED = 0, 1, 2, 3
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

HomeOption = Annotated[Path, typer.Option("--home", envvar="WARMLINE_HOME", help="The home directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HOME = Path("~/.warmline")

app = typer.Typer(
    help="Looks at what Warmline has stored, checks it, removes it; whether the proxy runs or not.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command(short_help="Show all conversations, or one in detail.")
def inspect(
    item: Annotated[str, typer.Argument(help="A session, segment or checkpoint id, or its beginning.")] = "",
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """All conversations; or one with its path of segments; or one file's row."""
    with _reading(home) as reader:
        snapshot = reader.snapshot()
    if not item:
        view = views.conversations(snapshot, time.time())
        return _show(view, tables.conversations(view), as_json)
    kind, row_id = _resolved(snapshot, item)
    if kind == "session":
        view = views.conversation(snapshot, row_id, time.time())
        return _show(view, tables.conversation(view), as_json)
    view = {"segment": views.segment, "checkpoint": views.checkpoint, "quarantined": views.quarantined}[kind](
        snapshot, row_id
    )
    _show(view, tables.fields(view), as_json)


@app.command(short_help="Show totals, hits and misses.")
def stats(home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """What is on disk, and how the last requests went."""
    with _reading(home) as reader:
        view = views.stats(reader.totals(), reader.requests())
    _show(view, tables.fields(view), as_json)


@app.command(short_help="Check the index and its files, and repair them.")
def verify(
    session: Annotated[str, typer.Argument(help="With --replay: one conversation, by id or its beginning.")] = "",
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte of every file.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Have the running pair compute what is stored again, cold, and compare.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended, say what was done, then check all (--deep).")
    ] = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Check the index and its files; exit code 1 where something is (or is left) wrong."""
    if replay and repair:
        _fail("one at a time: --repair, then --replay", EXIT_USAGE)
    if replay:
        return _replay(session, home, as_json)
    if session:
        _fail("one conversation alone can only be replayed: add --replay", EXIT_USAGE)
    did: list[Finding] = []
    if repair:
        with _failing():
            did, deep = client.repair(_home(home)).did, True
    with _reading(home) as reader:
        client.check_readable(reader.home)
        found, totals = reader.verify(deep), reader.totals()
    summary = f"{totals.segments} segments and {totals.checkpoints} checkpoints checked: {len(found)} findings"
    view = {
        "findings": [msgspec.structs.asdict(finding) for finding in found],
        "segments": totals.segments,
        "checkpoints": totals.checkpoints,
        "deep": deep,
    }
    if repair:
        view["did"] = [msgspec.structs.asdict(each) for each in did]
    _show(view, [*(tables.repaired(did) if repair else ()), *tables.findings(found, summary)], as_json)
    if found:
        raise typer.Exit(EXIT_FOUND)


def _replay(session: str, home: Path, as_json: bool) -> None:
    with _reading(home) as reader:
        wanted = _session(reader.snapshot(), session)
    with _failing():
        reply = client.replay(_home(home), ReplayRequest(session=wanted))
    view = {"replays": [msgspec.structs.asdict(each) for each in reply.replays]}
    _show(view, tables.replays(reply.replays), as_json)
    if any(each.outcome in views.REPLAYED_WRONG for each in reply.replays):
        raise typer.Exit(EXIT_FOUND)


@app.command(short_help="Remove conversations.")
def purge(
    session: Annotated[str, typer.Option(help="One conversation, by id or its beginning.")] = "",
    model: Annotated[str, typer.Option(help="Everything of one model.")] = "",
    older_than: Annotated[str, typer.Option(help="What was last used before: 90s, 30m, 12h, 7d, 2w.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Remove conversations from disk, and every trace of them from the index."""
    if sum(map(bool, (session, model, older_than, everything))) != 1:
        _fail("name exactly one of --session, --model, --older-than, --all", EXIT_USAGE)
    if not (dry_run or yes or sys.stdin.isatty()):
        _fail("purge asks before it removes anything; without a terminal, say --yes or --dry-run", EXIT_USAGE)
    older_than_s = _seconds(older_than)
    with _reading(home) as reader:
        snapshot = reader.snapshot()
    request = PurgeRequest(
        session=_session(snapshot, session), model=model, older_than_s=older_than_s, everything=everything
    )
    reply = _preview(snapshot, request)
    if not dry_run:
        if not (yes or typer.confirm(f"{tables.purged(reply).removeprefix('would ')}?", err=True)):
            _fail("nothing was purged", EXIT_OK)
        with _failing():
            reply = client.purge(_home(home), request)
    _show(msgspec.structs.asdict(reply), [tables.purged(reply)], as_json)


def _session(snapshot: Snapshot, typed: str) -> str:
    if not typed:
        return ""
    kind, row_id = _resolved(snapshot, typed)
    if kind != "session":
        _fail(f"{typed} is a {kind}, not a session", EXIT_USAGE)
    return row_id


def _preview(snapshot: Snapshot, request: PurgeRequest) -> PurgeReply:
    """What would go; ends with exit code 1 where that is nothing."""
    selection = select(snapshot, request, time.time())
    if not (selection.sessions or selection.segments or selection.quarantined or request.everything):
        _fail("nothing matches", EXIT_FOUND)
    return told(selection, dry_run=True)


def _resolved(snapshot: Snapshot, typed: str) -> tuple[str, str]:
    try:
        kind, row_id = views.resolve(snapshot, typed)
    except views.Ambiguous as error:
        _fail(str(error), EXIT_USAGE)
    if not kind:
        _fail(f"nothing stored is called {typed}", EXIT_FOUND)
    return kind, row_id


def _seconds(text: str) -> float | None:
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if found is None:
        _fail(f"{text!r} is no age; say 90s, 30m, 12h, 7d or 2w", EXIT_USAGE)
    return float(found[1]) * UNITS_S[found[2]]


def _home(path: Path) -> Home:
    return Home(path.expanduser().absolute())


@contextmanager
def _reading(home: Path) -> Iterator[IndexReader]:
    with _failing(), client.open_reader(_home(home)) as reader:
        yield reader


@contextmanager
def _failing() -> Iterator[None]:
    """Errors that have a reason for people become a line and an exit code."""
    try:
        yield
    except client.NoHome as error:
        _fail(str(error), EXIT_USAGE)
    except (client.CannotDo, IndexFailure, OSError) as error:
        _fail(str(error), EXIT_REFUSED)


def _fail(message: str, code: int) -> NoReturn:
    print(f"cachectl: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _show(view: dict[str, Any], for_people: Iterable[Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(view, indent=2, default=msgspec.to_builtins))
        return
    console = tables.console()
    for part in for_people:
        console.print(part)
