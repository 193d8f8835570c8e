"""Commands that move conversations between homes: `export` and `import`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from warmline_cachectl import client
from warmline_cachectl.errors import EXIT_REFUSED, EXIT_USAGE, exit_on_error, fail, fail_on_os_error
from warmline_cachectl.lookup import open_index, resolve_session_id
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, QuietOption, SessionArgument, make_home
from warmline_cachectl.views import tables
from warmline_cachectl.views.columns import printable
from warmline_cachectl.views.output import show, show_progress, show_spinner
from warmline_cachectl.views.tables import format_count
from warmline_common.storage import disk
from warmline_common.storage.file_lock import is_process_alive
from warmline_common.storage.home import Home
from warmline_common.storage.segment_writer import Bytes
from warmline_proxy.archive.exporter import Exporter, ExportResult
from warmline_proxy.archive.importer import ImportReply, ImportRequest, find_known_models, import_archive
from warmline_proxy.archive.reader import open_archive
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.auth.key_store import KeyStoreError
from warmline_proxy.index.index import DiskBudgetError, Index
from warmline_proxy.index.recovery.startup import reconcile

IMPORT_TIMEOUT_S = 24 * 3600.0  # every byte is read twice, and what is new is written
STANDARD_STREAM = "-"
SPOOL_CHUNK_BYTES = 1 << 20
ARCHIVE_ERROR_STATUSES = (400, 409)  # a proxy's answers about an archive; other refusals are about access, or the proxy

app = CommandApp("Change")


@app.add(
    "Write a conversation into a file.",
    "cachectl export SESSION talk.warmline",
    "cachectl export SESSION talk.warmline --force  # overwrite an earlier export",
)
def export(
    session: SessionArgument,
    file: Annotated[str, typer.Argument(help="A file that is not there yet; - for standard output.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    quiet: QuietOption = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Write a stored conversation into one file, for another machine with the same model, or as a backup.

    It is as private as the conversation. Nothing is removed here, and the proxy may run meanwhile.
    """
    _check_target(file, force, as_json)
    with open_index(home) as reader:
        session_id = resolve_session_id(reader.snapshot(), session)
        with _exit_on_archive_error(session), Exporter(reader, session_id) as exporter:
            with show_progress("exporting", exporter.bytes_count, quiet) as progress:
                _write_archive(file, _report_progress(exporter.read_chunks(), progress))
            result = exporter.result
    if file == STANDARD_STREAM:
        print(printable(_format_export(result, "standard output")), file=sys.stderr)
    else:
        show({**msgspec.structs.asdict(result), "file": file}, [_format_export(result, file)], as_json)


@app.add(
    "Store an exported conversation.",
    "cachectl import talk.warmline",
    "cachectl import talk.warmline --json",
    name="import",
)
def import_(
    file: Annotated[str, typer.Argument(help="What `cachectl export` wrote; - for standard input.")],
    key: Annotated[str, typer.Option("--key", help="Name of the client key that is to own it.")] = "",
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
    place = make_home(home)
    with exit_on_error():
        client.check_home(place)
        with _spool_to_disk(place, file) as path:
            reply = _import_archive(place, file, ImportRequest(path=str(path), key=key, anyway=anyway), quiet)
    show(msgspec.structs.asdict(reply), [_format_import(reply)], as_json)


@contextmanager
def _exit_on_archive_error(source: str) -> Iterator[None]:
    """End the command on an archive's error, with the same line with a proxy and without."""
    name = "standard input" if source == STANDARD_STREAM else source
    try:
        yield
    except DiskBudgetError as error:
        fail(f"{name}: there is no room for it: {error}", EXIT_REFUSED)
    except (ArchiveError, KeyStoreError) as error:
        fail(f"{name}: {error}", EXIT_REFUSED)
    except client.ProxyRefusedError as error:
        if error.status not in ARCHIVE_ERROR_STATUSES:
            raise
        fail(f"{name}: {error}", EXIT_REFUSED)


# ---- export


def _check_target(file: str, force: bool, as_json: bool) -> None:
    if file == STANDARD_STREAM:
        if as_json or sys.stdout.isatty():
            fail("with - standard output is the archive: send it into a file or a pipe, without --json", EXIT_USAGE)
        return
    path = Path(file)
    if not path.absolute().parent.is_dir():
        fail(f"there is no folder {path.absolute().parent}", EXIT_USAGE)
    if path.exists() and not path.is_file():
        fail(f"{file} is no plain file; name another, or - for standard output", EXIT_USAGE)
    if path.exists() and not force:
        fail(f"{file} exists already; add --force to overwrite it", EXIT_USAGE)


def _write_archive(file: str, chunks: Iterator[Bytes]) -> None:
    """Write an archive whole and durable, or not at all; readable by its owner alone."""
    if file != STANDARD_STREAM:
        disk.write_durable(Path(file).absolute(), chunks)
        return
    try:
        for part in chunks:
            sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        fail_on_os_error(error, is_output=True)


def _report_progress(chunks: Iterator[Bytes], progress: Callable[[int], None]) -> Iterator[Bytes]:
    for part in chunks:
        progress(len(part))
        yield part


def _format_export(exported: ExportResult, destination: str) -> str:
    tokens, files = format_count(exported.tokens, "token"), tables.format_files(exported.segments, exported.checkpoints)
    size = tables.format_size(exported.bytes_count)
    return f"exported {tokens} of {exported.model} in {files}: {size} to {destination}"


# ---- import


@contextmanager
def _spool_to_disk(home: Home, file: str) -> Iterator[Path]:
    """Yield the archive's path, or a copy of standard input, which can be read from any position."""
    if file != STANDARD_STREAM:
        yield Path(file).absolute()
        return
    disk.make_folders(home.run)
    for leftover in home.run.glob(f"import.*{disk.DRAFT_SUFFIX}"):
        if (pid := leftover.name.split(".")[1]).isdigit() and not is_process_alive(int(pid)):  # it was killed
            disk.delete(leftover)
    path = home.run / f"import.{os.getpid()}{disk.DRAFT_SUFFIX}"
    disk.delete(path)  # of an earlier process with this pid
    try:
        with disk.create(path) as spool:
            while chunk := sys.stdin.buffer.read(SPOOL_CHUNK_BYTES):
                disk.write(spool, chunk)
        yield path
    finally:
        disk.delete(path)


def _import_archive(home: Home, file: str, request: ImportRequest, quiet: bool) -> ImportReply:
    """Import by the proxy where one runs, else under the home's lock."""
    with suppress(client.ProxyNotRunningError), _exit_on_archive_error(file), show_spinner("importing", quiet):
        return client.request_proxy(home, "/warmline/import", ImportReply, IMPORT_TIMEOUT_S, request)
    home.prepare()
    return client.run_locked(home, lambda index: _import_locally(index, file, request, quiet))


def _import_locally(index: Index, file: str, request: ImportRequest, quiet: bool) -> ImportReply:
    """Import as a proxy would after its start: unfinished changes of an earlier process are completed first."""
    path, done = Path(request.path), 0
    with _exit_on_archive_error(file):
        reconcile(index)
        tenant = client.read_key_tenants(index.home).find_tenant(request.key)
        with open_archive(path) as archive, show_progress("importing", 2 * archive.bytes_count, quiet) as advance:

            def progress(now: int, _: int) -> None:
                nonlocal done
                advance(now - done)
                done = now

            models = find_known_models(index)
            return import_archive(index, archive, tenant, models, anyway=request.anyway, progress=progress)


def _format_import(imported: ImportReply) -> str:
    tokens = f"{format_count(imported.tokens, 'token')} of {imported.model}"
    if not imported.segments and not imported.checkpoints:
        return f"all {tokens} are stored already, as session {imported.session}"
    known = f", {imported.tokens_known:,} of them were stored already" if imported.tokens_known else ""
    files = tables.format_files(imported.segments, imported.checkpoints)
    size = tables.format_size(imported.bytes_written)
    return f"imported {tokens} as session {imported.session}{known}: {files}, {size}"
