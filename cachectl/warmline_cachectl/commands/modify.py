"""Commands that change what is stored: through the proxy where one runs, else under the home's lock."""

import re
import sys
from typing import Annotated

import msgspec
import typer

from warmline_cachectl import client
from warmline_cachectl.completion import complete_key_names, complete_models, complete_session_ids
from warmline_cachectl.errors import EXIT_FOUND, EXIT_OK, EXIT_REFUSED, EXIT_USAGE, exit_on_error, fail
from warmline_cachectl.lookup import describe_unknown_model, open_index, resolve_session_id
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, QuietOption, SessionArgument, make_home
from warmline_cachectl.views import tables
from warmline_cachectl.views.output import show, show_spinner
from warmline_common.process.arguments import GB
from warmline_common.settings.parsers import make_amount_parser, make_option_parser
from warmline_proxy.auth.owners import SHARED_BY_ALL_LABEL, SHARED_LABEL, OwnerLabels
from warmline_proxy.retention.purge import preview_purge, resolve_key
from warmline_proxy.store.rows import GcRequest, IndexSnapshot, PinRequest, PurgeReply, PurgeRequest, Truncation

TO_GB_MAX = 1e9  # more bytes than a message can say
AGE_S_MAX = 1e12  # older than any record
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

app = CommandApp("Change")


@app.add(
    "Remove conversations.",
    "cachectl purge SESSION --dry-run  # only list what would be deleted",
    "cachectl purge --key laptop --yes  # one key's data, as `cachectl ls` names it",
    "cachectl purge --all --yes",
)
def purge(
    conversation: SessionArgument = "",
    session: Annotated[
        str, typer.Option(help="The same as SESSION.", autocompletion=complete_session_ids, show_default=False)
    ] = "",
    model: Annotated[str, typer.Option(help="Everything of one model.", autocompletion=complete_models)] = "",
    key: Annotated[
        str,
        typer.Option(
            help="What is stored under one key, by its name; or 'no key', shared, 'a removed key', as tables say it.",
            autocompletion=complete_key_names,
        ),
    ] = "",
    older_than: Annotated[str, typer.Option(help="What was last used before: 90s, 30m, 12h, 7d, 2w.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    quiet: QuietOption = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Remove conversations from disk, and every trace of them from the index; pinned ones too."""
    if sum(map(bool, (conversation, session, model, key, older_than, everything))) != 1:
        fail("name exactly one of SESSION, --model, --key, --older-than, --all", EXIT_USAGE)
    older_than_s = _parse_age(older_than)
    with open_index(home) as reader:
        snapshot = reader.snapshot()
        labels = client.read_owner_labels(reader.home, snapshot) if key else OwnerLabels()
        session = resolve_session_id(snapshot, conversation or session)
        request = PurgeRequest(session=session, model=model, key=key, older_than_s=older_than_s, everything=everything)
        reply = preview_purge(reader, resolve_key(request, labels))
    if dry_run or not key:  # records and memory may have something of a key of which nothing is on disk
        _fail_on_no_match(reply, request, snapshot, labels)
    if not dry_run:
        if not yes:
            _confirm(reply)
        with exit_on_error(), show_spinner("removing", quiet):
            reply = client.purge(make_home(home), request)
        _fail_on_no_match(reply, request, snapshot, labels)
    show(msgspec.to_builtins(reply), [tables.format_purge(reply)], as_json)
    _fail_on_uncut_segments(reply.cuts)
    if key:
        _fail_on_unknown_owners(snapshot, labels)


@app.add("Keep a conversation from being evicted.", "cachectl pin SESSION", "cachectl pin SESSION --off")
def pin(
    session: SessionArgument,
    off: Annotated[bool, typer.Option("--off", help="Let it be evicted again.")] = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Keep a stored conversation, however long it is not used; at most four fifths of the budget.

    What it gains later is pinned once you pin it again. A purge removes it all the same.
    """
    with open_index(home) as reader:
        request = PinRequest(session=resolve_session_id(reader.snapshot(), session), off=off)
    with exit_on_error():
        reply = client.pin(make_home(home), request)
    show(msgspec.structs.asdict(reply), [tables.format_pin(reply)], as_json)


_parse_to_gb = make_option_parser(make_amount_parser("gigabytes", 0, TO_GB_MAX), typer.BadParameter)


@app.add(
    "Delete unneeded data, and evict to the budget.",
    "cachectl gc",
    "cachectl gc --to-gb 20  # evict until no more is used",
)
def gc(
    to_gb: Annotated[
        float | None,
        typer.Option("--to-gb", min=0, parser=_parse_to_gb, help="Evict until no more is used; default: the budget."),
    ] = None,
    quiet: QuietOption = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Delete orphaned and incomplete files and records older than 30 days, compact the index, evict.

    Pinned data, and data in use or being written, stays.
    """
    with open_index(home):
        pass  # where nothing was ever stored there is nothing to collect, and no index to be made
    with exit_on_error(), show_spinner("collecting", quiet):
        reply = client.gc(make_home(home), GcRequest(to_bytes=None if to_gb is None else int(to_gb * GB)))
    show(msgspec.to_builtins(reply), tables.render_gc(reply), as_json)
    _fail_on_uncut_segments(reply.cuts)


def _confirm(reply: PurgeReply) -> None:
    """End the command unless the user confirms the purge."""
    if not sys.stdin.isatty():
        fail("purge asks before it removes anything; without a terminal, say --yes or --dry-run", EXIT_USAGE)
    if not typer.confirm(f"{tables.format_purge(reply).removeprefix('would ')}?", err=True):
        fail("nothing was purged", EXIT_OK)


def _fail_on_no_match(
    reply: PurgeReply, request: PurgeRequest, snapshot: IndexSnapshot, owner_labels: OwnerLabels
) -> None:
    """End with exit code 1 where nothing was purged, or would be."""
    if not (reply.sessions or reply.segments or reply.quarantined or request.everything):
        if request.model:
            fail(describe_unknown_model(snapshot, request.model), EXIT_FOUND)
        labels = owner_labels.words.values() if request.key else ()
        shared = [label for label in (SHARED_LABEL, SHARED_BY_ALL_LABEL) if label in labels]
        hint = f"; all keys share a cache: --key {shared[0]!r}" if shared else ""
        fail(f"nothing matches{hint}", EXIT_FOUND)


def _fail_on_unknown_owners(snapshot: IndexSnapshot, owner_labels: OwnerLabels) -> None:
    """End with exit code 3 where segments of unknown owners may be that key's too."""
    if unknown := sum(row.root.hex() not in owner_labels.words for row in snapshot.segments.values()):
        what = tables.format_count(unknown, "more segment")
        mend = "`cachectl verify --repair` sets them aside, then purge again"
        fail(f"{what} may be that key's too; damaged files don't name their owner: {mend}", EXIT_REFUSED)


def _fail_on_uncut_segments(cuts: list[Truncation]) -> None:
    """End with exit code 3 where a segment could not be cut."""
    if left := [cut for cut in cuts if cut.why_not]:
        why = "; ".join(f"segment {cut.segment}: {cut.why_not}" for cut in left)
        weight = tables.format_size(sum(cut.bytes_count for cut in left))
        fail(f"{weight} of unneeded data could not be cut away; `cachectl gc` tries again: {why}", EXIT_REFUSED)


def _parse_age(text: str) -> float | None:
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if found is None or (age_s := float(found[1]) * UNITS_S[found[2]]) > AGE_S_MAX:
        fail(f"{text!r} is no age; say 90s, 30m, 12h, 7d or 2w", EXIT_USAGE)
    return age_s
