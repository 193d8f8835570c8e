"""The verbs that move conversations between homes: `export` and `import`."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from warmline_cachectl import client, configured
from warmline_cachectl.completion import session_ids
from warmline_cachectl.options import (
    CHANGING,
    EXIT_REFUSED,
    EXIT_USAGE,
    HOME,
    HomeOption,
    JsonOption,
    QuietOption,
    examples,
    fail,
    failing,
    home_at,
    reading,
    session_id,
)
from warmline_cachectl.views import tables
from warmline_cachectl.views.columns import printable
from warmline_cachectl.views.output import counting, show, waiting
from warmline_common.storage import disk
from warmline_common.storage.file_lock import is_alive
from warmline_common.storage.home import Home
from warmline_proxy.archive.exporter import Export, Exported
from warmline_proxy.archive.importer import Imported, ImportRequest, import_archive, known_from_files
from warmline_proxy.archive.reader import open_archive
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.auth.key_store import KeysUnusable
from warmline_proxy.index.index import Index, NoRoom
from warmline_proxy.index.recovery.startup import reconcile

IMPORT_TIMEOUT_S = 24 * 3600.0  # every byte is read twice, and what is new is written
STANDARD = "-"
ABOUT_THE_ARCHIVE = (400, 409)  # what a proxy answers; other refusals are about who asks, or the proxy itself

app = typer.Typer()


@app.command(
    short_help="Write a conversation into a file.",
    rich_help_panel=CHANGING,
    epilog=examples(
        "cachectl export SESSION talk.warmline",
        "cachectl export SESSION talk.warmline --force  # overwrite what was exported earlier",
    ),
)
def export(
    session: Annotated[str, typer.Argument(help="A conversation's id, or its beginning.", autocompletion=session_ids)],
    file: Annotated[str, typer.Argument(help="A file that is not there yet; - for standard output.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    quiet: QuietOption = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Write what is stored of a conversation into one file, for another machine with the same model, or as a backup.

    It is as private as the conversation. Nothing is removed here, and the proxy may run meanwhile.
    """
    _check_target(file, force, as_json)
    with reading(home) as reader:
        wanted = session_id(reader.snapshot(), session)
        with _archives(session), Export(reader, wanted) as opened:
            with counting("exporting", opened.bytes_count, quiet) as progress:
                _written(file, _counted(opened.parts(), progress))
            told = opened.told
    if file == STANDARD:
        print(printable(_exported(told, "standard output")), file=sys.stderr)
    else:
        show({**msgspec.structs.asdict(told), "file": file}, [_exported(told, file)], as_json)


@app.command(
    name="import",
    short_help="Store what was exported.",
    rich_help_panel=CHANGING,
    epilog=examples("cachectl import talk.warmline", "cachectl import talk.warmline --json"),
)
def import_(
    file: Annotated[str, typer.Argument(help="What `cachectl export` wrote; - for standard input.")],
    key: Annotated[str, typer.Option("--key", help="The client key whose it is to be, by name.")] = "",
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also where another model is served, which can't use it.")
    ] = False,
    quiet: QuietOption = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Make an exported conversation part of this home: all of it, or nothing where anything in it is wrong.

    What is stored already is skipped. Import only what you trust: checksums find damage, not lies.
    """
    place = home_at(home)
    with failing():
        client.check_home(place)
        with _on_disk(place, file) as path:
            told = _imported(place, file, ImportRequest(path=str(path), key=key, anyway=anyway), quiet)
    show(msgspec.structs.asdict(told), [_stored(told)], as_json)


@contextmanager
def _archives(what: str) -> Iterator[None]:
    """What can be wrong with one becomes a line and an exit code, the same whether a proxy found it or we did."""
    name = "standard input" if what == STANDARD else what
    try:
        yield
    except NoRoom as error:
        fail(f"{name}: there is no room for it: {error}", EXIT_REFUSED)
    except (ArchiveError, KeysUnusable) as error:
        fail(f"{name}: {error}", EXIT_REFUSED)
    except client.RefusedByProxy as error:
        if error.status not in ABOUT_THE_ARCHIVE:
            raise
        fail(f"{name}: {error}", EXIT_REFUSED)


# ---- export


def _check_target(file: str, force: bool, as_json: bool) -> None:
    if file == STANDARD:
        if as_json or sys.stdout.isatty():
            fail("with - standard output is the archive: send it into a file or a pipe, without --json", EXIT_USAGE)
        return
    path = Path(file)
    if not path.absolute().parent.is_dir():
        fail(f"there is no folder {path.absolute().parent}", EXIT_USAGE)
    if path.exists() and not path.is_file():
        fail(f"{file} is no plain file; name another, or - for standard output", EXIT_USAGE)
    if path.exists() and not force:
        fail(f"{file} is there already; add --force to overwrite it", EXIT_USAGE)


def _written(file: str, parts: Iterator[bytes]) -> None:
    """Whole and durable, or not at all; readable by its owner alone."""
    if file != STANDARD:
        disk.write_whole(Path(file).absolute(), parts)
        return
    for part in parts:
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def _counted(parts: Iterator[bytes], progress: Callable[[int], None]) -> Iterator[bytes]:
    for part in parts:
        progress(len(part))
        yield part


def _exported(told: Exported, where: str) -> str:
    what = f"{tables.count(told.segments, 'segment')} and {tables.count(told.checkpoints, 'checkpoint')}"
    tokens, size = tables.count(told.tokens, "token"), tables.size(told.bytes_count)
    return f"exported {tokens} of {told.model} in {what}: {size} to {where}"


# ---- import


@contextmanager
def _on_disk(home: Home, file: str) -> Iterator[Path]:
    """Where it can be read from any place, which standard input can't."""
    if file != STANDARD:
        yield Path(file).absolute()
        return
    disk.make_folders(home.run)
    for left in home.run.glob(f"import.*{disk.DRAFT_SUFFIX}"):
        if (pid := left.name.split(".")[1]).isdigit() and not is_alive(int(pid)):  # it was killed
            disk.delete(left)
    path = home.run / f"import.{os.getpid()}{disk.DRAFT_SUFFIX}"
    disk.delete(path)  # of one that had this number
    try:
        with disk.create(path) as spool:
            shutil.copyfileobj(sys.stdin.buffer, _Spool(spool))
        yield path
    finally:
        disk.delete(path)


class _Spool:
    """What `copyfileobj` writes to; writes as all of a home is written."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        disk.write(self._file, data)
        return len(data)


def _imported(home: Home, file: str, request: ImportRequest, quiet: bool) -> Imported:
    """By the proxy where one runs, else here."""
    with suppress(client.NoProxy), _archives(file), waiting("importing", quiet):
        return client.ask(home, "/warmline/import", Imported, IMPORT_TIMEOUT_S, request)
    home.prepare()

    def here(index: Index) -> Imported:
        with _archives(file):
            return _import_here(index, request, quiet)

    return client.owned(home, here)


def _import_here(index: Index, request: ImportRequest, quiet: bool) -> Imported:
    """As a proxy would after its start: what an earlier one left undone is put in order first."""
    home, done = index.home, 0
    reconcile(index)
    tenant = configured.key_holders(home).tenant(request.key)
    with (
        open_archive(Path(request.path)) as archive,
        counting("importing", 2 * archive.bytes_count, quiet) as advance,
    ):

        def progress(now: int, _: int) -> None:
            nonlocal done
            advance(now - done)
            done = now

        known = known_from_files(index)
        return import_archive(index, archive, tenant, known, anyway=request.anyway, progress=progress)


def _stored(told: Imported) -> str:
    if not told.segments and not told.checkpoints:
        return f"all {tables.count(told.tokens, 'token')} of {told.model} are stored already, as session {told.session}"
    what = f"{tables.count(told.segments, 'segment')} and {tables.count(told.checkpoints, 'checkpoint')}"
    known = f", {told.tokens_known:,} of them were stored already" if told.tokens_known else ""
    return (
        f"imported {tables.count(told.tokens, 'token')} of {told.model} as session {told.session}{known}: "
        f"{what}, {tables.size(told.bytes_written)}"
    )
