"""Full disk: the reserve lets files be deleted, and nothing else be written."""

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from support.index.indexes import count_file_bytes, count_matched, save
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.reserve import RESERVE_BYTES
from warmline_proxy.store.rows import GcRequest, PurgeRequest, RequestRecord
from warmline_proxy.store.tables import Tables

A = list(range(1000, 3000))


@pytest.fixture
def full(home: Home, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """`full()`: from the call on only the reserve is left; LMDB can't commit, and nothing new can be created."""

    def fill() -> None:
        fail_commits(monkeypatch, home.reserve.exists)

    return fill


def fail_commits(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool]) -> None:
    """Have LMDB find no space for a commit while the disk `is_full`."""
    real = disk.run_lmdb

    def in_lmdb(what: str, act: Callable[[], Any]) -> Any:
        if is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(what, act)

    monkeypatch.setattr(disk, "run_lmdb", in_lmdb)


@pytest.mark.parametrize(
    "work",
    [
        lambda index: index.free_bytes(1),
        lambda index: purge(index, PurgeRequest(everything=True)),
        lambda index: collect_garbage(index, GcRequest(to_bytes=0), is_saving=True),
    ],
    ids=["eviction", "purge", "gc"],
)
def test_only_deletions_use_reserve(home: Home, full: Callable[[], None], work: Callable[[Index], object]) -> None:
    with Index(home, 1 << 30) as index:
        save(index, A)
        index.allocate_reserve()
        assert home.reserve.stat().st_blocks * 512 >= RESERVE_BYTES
        full()
        with pytest.raises(IndexStoreError, match="No space left"):
            save(index, [7, *A])
        assert home.reserve.exists() and count_matched(index, A) == len(A)
        work(index)
        assert count_matched(index, A) == 0 and count_file_bytes(home) == 0
        index.renew_reserve()
        assert home.reserve.exists()


def test_partial_reserve_is_completed(home: Home) -> None:
    home.reserve.write_bytes(bytes(1000))
    with Index(home, 1 << 30) as index:
        index.allocate_reserve()
    assert home.reserve.stat().st_size == RESERVE_BYTES and home.reserve.stat().st_blocks * 512 >= RESERVE_BYTES


def test_missing_reserve_changes_nothing_and_is_reported(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Index(home, 1 << 30) as index:
        save(index, A)
        with monkeypatch.context() as planted:
            planted.setattr(disk, "allocate", fails)
            index.allocate_reserve()
            assert not home.reserve.exists()
            planted.setattr(disk, "run_lmdb", fails)
            with pytest.raises(IndexStoreError, match="No space left"):
                index.free_bytes(1)
        assert count_matched(index, A) == len(A)
        index.renew_reserve()
        assert home.reserve.exists()


@pytest.fixture
def refill(home: Home, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """`refill()`: from the call on LMDB can commit only what stored files have freed: the reserve is used up."""

    def fill() -> None:
        home.reserve.unlink(missing_ok=True)
        stored = count_file_bytes(home)
        fail_commits(monkeypatch, lambda: count_file_bytes(home) == stored)

    return fill


@pytest.mark.parametrize(
    "work",
    [
        lambda index: purge(index, PurgeRequest(everything=True)),
        lambda index: collect_garbage(index, GcRequest(to_bytes=0), is_saving=True),
    ],
    ids=["purge", "gc"],
)
def test_deletions_free_their_files_first_without_reserve(
    home: Home, refill: Callable[[], None], work: Callable[[Index], object]
) -> None:
    with Index(home, 1 << 30) as index:
        reconcile(index)
        save(index, A)
        save(index, [7, *A])
        index.record_request(RequestRecord(id="r", at=1.0, endpoint="chat", client_model="m", outcome="ok", source=""))
        index.flush()
        refill()
        with pytest.raises(IndexStoreError, match="No space left"):
            save(index, [8, *A])
        work(index)
        assert index.segments() == [] and count_file_bytes(home) == 0
        save(index, A)
        assert verify_index(index, deep=True) == []


def test_eviction_for_saves_deletes_no_file_first(home: Home, refill: Callable[[], None]) -> None:
    """On a disk that stays full it would delete file after file in vain."""
    with Index(home, 1 << 30) as index:
        save(index, A)
        before = count_file_bytes(home)
        refill()
        with pytest.raises(IndexStoreError, match="No space left"):
            index.free_bytes(1 << 30)
        assert count_file_bytes(home) == before and count_matched(index, A) == len(A)


def test_leased_file_is_not_freed_first(home: Home, refill: Callable[[], None]) -> None:
    with Index(home, 1 << 30) as index:
        save(index, A)
        leased = {row.id for row in index.segments()}
        save(index, [7, *A])
        index.lease(leased)
        refill()
        purge(index, PurgeRequest(everything=True))
        assert index.segments() == [] and all(home.segment_file(file_id).exists() for file_id in leased)
        index.release(leased)
        assert index.sweep() == len(leased)


def test_gc_of_full_disk_fails_only_where_traces_are_left(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise IndexStoreError("can't write the index anew: No space left on device", "ENOSPC")

    with Index(home, 1 << 30) as index:
        reconcile(index)
        save(index, A)
        monkeypatch.setattr(index, "compact", fail)
        assert collect_garbage(index, GcRequest(), is_saving=True).evicted == []
        assert count_matched(index, A) == len(A)
        index.transact(Tables.mark_purged)
        with pytest.raises(IndexStoreError, match="No space left"):
            collect_garbage(index, GcRequest(), is_saving=True)


@pytest.mark.parametrize(("free_bytes", "code"), [(0, "ENOSPC"), (4096, "ENOSPC"), (1 << 30, "EIO")])
def test_write_cut_short_by_full_disk_is_no_io_error(
    home: Home, free_bytes: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Index(home, 1 << 30) as index:
        with monkeypatch.context() as planted:
            planted.setattr(disk, "run_lmdb", fail)
            planted.setattr(disk, "count_free_bytes", lambda _: free_bytes)
            with pytest.raises(IndexStoreError, match="Input/output error") as refused:
                save(index, A)
        assert refused.value.code == code
        save(index, A)
