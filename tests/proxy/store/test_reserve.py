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
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.reserve import RESERVE_BYTES
from warmline_proxy.store.rows import GcRequest, PurgeRequest

A = list(range(1000, 3000))


@pytest.fixture
def full(home: Home, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """`full()`: from the call on only the reserve is left; LMDB can't commit, and nothing new can be created."""

    def fill() -> None:
        real = disk.run_lmdb

        def in_lmdb(what: str, act: Callable[[], Any]) -> Any:
            if home.reserve.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(what, act)

        monkeypatch.setattr(disk, "run_lmdb", in_lmdb)

    return fill


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
