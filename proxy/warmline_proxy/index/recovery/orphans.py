"""Orphans: files without a row, left by processes that were killed."""

from contextlib import suppress

from warmline_common.storage import disk
from warmline_proxy.index.index import Index
from warmline_proxy.index.save import abort_save
from warmline_proxy.store import files
from warmline_proxy.store.tables import Tables


def delete_leftovers(index: Index) -> None:
    """Abort the saves of a proxy that has ended, and delete orphans.  Raises IndexStoreError, OSError.

    For purges without a proxy: an orphan may hold any conversation.
    """
    index.transact(lambda tables: [abort_save(tables, plan) for plan in tables.save_plans()], frees_space=True)
    index.sweep()
    delete_orphans(index)


def delete_orphans(index: Index, before: float = float("inf")) -> list[tuple[str, int]]:
    """Delete orphans last written before then (Unix seconds); returns their ids ("" for drafts) and bytes.

    The files are listed first: a save's row precedes its file.  Raises IndexStoreError, OSError.
    """
    listed = [*files.list_stored(index.home), *files.list_quarantined(index.home)]
    with index.read_transaction() as tables:
        owned_ids = _list_owned_ids(tables)
    deleted: list[tuple[str, int]] = []
    for file_id, path in listed:
        with suppress(FileNotFoundError):
            if file_id not in owned_ids and (found := path.stat()).st_mtime <= before:
                disk.delete(path)
                deleted.append((file_id, found.st_size))
    return deleted


def _list_owned_ids(tables: Tables) -> set[str]:
    """The ids of all files that are stored, quarantined, being written, or about to be deleted."""
    keys = (key for table in ("segments", "checkpoints", "quarantine", "doomed") for key, _ in tables.items(table))
    return {key.hex() for key in keys} | {file_id for plan in tables.save_plans() for file_id in plan.file_ids}
