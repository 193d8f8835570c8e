"""Files among the stored ones that nobody claims: what processes have left that were killed."""

from pathlib import Path

from warmline_common.storage import disk
from warmline_proxy.index.index import Index
from warmline_proxy.index.save import abort_save
from warmline_proxy.store import files as index_files
from warmline_proxy.store.tables import Tables


def delete_leftovers(index: Index) -> None:
    """While no proxy runs: the saves that one was at go, and what any process has left.  Raises IndexFailure, OSError.

    Nobody could tell of a file that is none of the tree whose conversation it has.
    """
    index.transact(lambda tables: [abort_save(tables, plan) for plan in tables.save_plans()], frees_space=True)
    index.sweep()
    delete_orphans(index)


def delete_orphans(index: Index, before: float = float("inf")) -> list[tuple[str, int]]:
    """Those last written before then: their ids ("" for a draft) and bytes.  Raises IndexFailure, OSError.

    What is saved meanwhile stands in the index before its file is there; so the files are listed first.
    """
    listed = [*index_files.list_stored(index.home), *index_files.list_quarantined(index.home)]
    claimed = index.transact(_list_claimed, frees_space=True)
    deleted: list[tuple[str, int]] = []
    for file_id, path in listed:
        size = None if file_id in claimed else _size_if_older(path, before)
        if size is not None:
            disk.delete(path)
            deleted.append((file_id, size))
    return deleted


def _list_claimed(tables: Tables) -> set[str]:
    """The ids of all files that are stored, set aside, being written, or about to be deleted."""
    keys = (key for table in ("segments", "checkpoints", "quarantine", "doomed") for key, _ in tables.items(table))
    return {key.hex() for key in keys} | {file_id for plan in tables.save_plans() for file_id in plan.file_ids}


def _size_if_older(path: Path, before: float) -> int | None:
    """None for what was written since then, or is gone by now."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size if found.st_mtime <= before else None
