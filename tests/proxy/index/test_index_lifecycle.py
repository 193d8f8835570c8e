"""Index from open to close: bookkeeping, full disks, failures, another schema, a missing index."""

import errno
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from support.index.indexes import LAYOUT, MODEL, PAGE_BYTES, ROOT, count_matched, make_home, save
from warmline_common.protocol.tokens import pack_tokens, unpack_tokens
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index, IndexReader
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.store.environment import LmdbEnvironment
from warmline_proxy.store.errors import (
    IndexDamagedError,
    IndexFullError,
    IndexMissingError,
    IndexSchemaError,
    IndexStoreError,
)
from warmline_proxy.store.rows import RequestRecord

A = list(range(1000, 4000))


def make_record(number: int) -> RequestRecord:
    return RequestRecord(
        id=str(number), at=float(number), endpoint="chat", client_model="m", outcome="ok", source="cold"
    )


def test_last_1000_request_records_are_kept(index: Index) -> None:
    for number in range(1100):
        index.record_request(make_record(number))
    index.flush()
    assert len(index.requests()) == 1000
    assert [row.id for row in index.requests(2)] == ["1099", "1098"]


def test_bookkeeping_is_flushed_on_close(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, A[:10])
        used = index.segments()[0].id
        index.record_use([used, "ab" * 16])  # one that is gone by now
        index.record_use([used])
        index.record_request(make_record(1))
    with IndexReader(home) as reader:
        usage = reader.snapshot().usage[used]
        assert usage.hits == 2 and usage.last_used > 0
        assert len(reader.requests()) == 1
        assert verify_index(reader, deep=True) == []


def test_index_survives_reopen_and_is_private(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, A[:3000], checkpoints=[100])
    with Index(home, 1 << 30) as index:
        assert count_matched(index, A) == 3000
        assert verify_index(index) == []
    modes = {path.name: path.stat().st_mode & 0o777 for path in home.index.rglob("*")}
    assert modes == {"1": 0o700, "data.mdb": 0o600, "lock.mdb": 0o600}


def test_full_map_grows(tmp_path: Path) -> None:
    home = make_home(tmp_path / "h")
    with Index(home, 1 << 30, map_bytes=1 << 18) as index:
        save(index, A[:1000])
        for number in range(20):
            save(index, [number, *range(3000)])
        index.compact()
        save(index, A[:2000])
        assert count_matched(index, A) == 2000
        assert index.totals().bytes_index > 1 << 18
    with Index(home, 1 << 30, map_bytes=1 << 18) as index:  # smaller than what is there
        assert count_matched(index, A) == 2000


READER = """
import sys
from pathlib import Path
from warmline_proxy.index.index import IndexReader
from warmline_common.storage.home import Home
with IndexReader(Home(Path(sys.argv[1]))) as reader:
    for line in sys.stdin:
        print(len(reader.segments()), flush=True)
"""


def test_reader_follows_growing_map(home: Home) -> None:
    with Index(home, 1 << 30, map_bytes=1 << 18) as index:
        save(index, A[:1000])
        other = [sys.executable, "-c", READER, str(home.root)]
        with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert read_segment_count(reader) == 1
            for number in range(20):
                save(index, [number, *range(3000)])
            assert read_segment_count(reader) == 21
            reader.communicate()


def read_segment_count(reader: "subprocess.Popen[str]") -> int:
    assert reader.stdin and reader.stdout
    reader.stdin.write("how many?\n")
    reader.stdin.flush()
    return int(reader.stdout.readline())


def test_map_growth_failure_refuses_save_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(tmp_path / "h")
    with Index(home, 1 << 30, map_bytes=1 << 18) as index:
        save(index, A[:1000])
        fail_in_lmdb(monkeypatch, "grow", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
        with pytest.raises(IndexFullError, match=r"256 KiB and can't grow: .*memory"):
            for number in range(100):
                save(index, [number, *range(3000)])
        for number in range(2000):
            index.record_request(make_record(number))  # more than fits: bookkeeping is lost, the writer lives on
        index.flush()
        assert count_matched(index, A) == 1000
        assert index.match_prefix(ROOT, pack_tokens(A), 10).tokens == 10
        monkeypatch.undo()
        save(index, A[:2000])
        assert count_matched(index, A) == 2000


def test_map_grows_after_readers_leave(tmp_path: Path) -> None:
    home = make_home(tmp_path / "h")
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with index._environment.read_transaction() as tables:
            inside.set()
            leave.wait(60)
            assert len(list(tables.segments())) == 1

    with Index(home, 1 << 30, map_bytes=1 << 18) as index:
        save(index, A[:1000])
        reader = threading.Thread(target=read)
        reader.start()
        inside.wait(60)
        writing = threading.Thread(target=lambda: [save(index, [number, *range(3000)]) for number in range(9)])
        writing.start()
        assert index.match_prefix(ROOT, pack_tokens(A), 10).tokens == 10
        leave.set()
        reader.join()
        writing.join()
        assert len(index.segments()) == 10


@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EROFS"])
def test_failed_commit_changes_nothing(code: str, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    save(index, A[:1000])
    number = getattr(errno, code)
    fail_in_lmdb(monkeypatch, "commit", OSError(number, os.strerror(number)))
    with pytest.raises(IndexStoreError, match=re.escape(os.strerror(number))) as failed:
        save(index, A[:2000])
    assert failed.value.code == code
    assert count_matched(index, A) == 1000
    monkeypatch.undo()
    save(index, A[:2000])
    assert count_matched(index, A) == 2000


def test_failed_write_reopens_environment(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    save(index, A[:1000])
    fail_in_lmdb(monkeypatch, "commit", lmdb.PanicError("a write failed"), times=1)
    with pytest.raises(IndexStoreError):
        save(index, A[:2000])
    save(index, A[:2000])
    assert count_matched(index, A) == 2000


@pytest.mark.parametrize("fault", ["panic", "growth"])
def test_failed_reopen_is_retried(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(tmp_path / "h")
    with Index(home, 1 << 30, map_bytes=1 << 18) as index:
        save(index, A[:1000])
        failures = {
            "panic": {"commit": lmdb.PanicError("a write failed")},
            "growth": {"grow": OSError(errno.ENOMEM, "")},
        }
        in_lmdb = {**failures[fault], "open": OSError(errno.EIO, os.strerror(errno.EIO))}

        def failing(operation: str, act: Callable[[], object]) -> object:
            if operation in in_lmdb:
                raise in_lmdb[operation]
            return act()

        monkeypatch.setattr(disk, "run_lmdb", failing)
        for _ in range(2):
            with pytest.raises(IndexStoreError):
                for number in range(9):
                    save(index, [number, *range(3000)])
            with pytest.raises(IndexStoreError, match="could not be opened again"):
                index.totals()
        monkeypatch.undo()
        save(index, A[:2000])
        assert count_matched(index, A) == 2000


def fail_in_lmdb(monkeypatch: pytest.MonkeyPatch, what: str, error: Exception, times: int = 1_000_000) -> None:
    left = itertools.count(times, -1)

    def in_lmdb(operation: str, act: Callable[[], object]) -> object:
        if operation == what and next(left) > 0:
            raise error
        return act()

    monkeypatch.setattr(disk, "run_lmdb", in_lmdb)


def cut_file(home: Home, pages: int) -> bytes:
    """Cut the index's file to so many pages, or by so many; what it was before."""
    (data,) = home.index.glob("*/data.mdb")
    whole = data.read_bytes()
    os.truncate(data, pages * PAGE_BYTES + (len(whole) if pages < 0 else 0))
    return whole


def require_cut_is_reported(*uses: Callable[[], object]) -> None:
    for use in uses:
        with pytest.raises(IndexDamagedError, match=r"was cut from .*verify --repair"):
            use()


@pytest.mark.parametrize("pages", [0, 1, 3, -1])
def test_open_index_reports_that_its_file_was_cut(home: Home, pages: int) -> None:
    """LMDB would end the process."""
    with Index(home, 1 << 30) as index:
        for number in range(40):
            save(index, [number] * 5)
        assert len(index.segments()) == 40
        cut_file(home, pages)
        require_cut_is_reported(
            index.segments, index.totals, index.require_sound_pages, index.compact, lambda: save(index, [7] * 9)
        )
        assert repair(index, deep=False, is_saving=False).did
        assert len(index.segments()) == 40
        save(index, [7] * 9)
        assert verify_index(index) == []


@pytest.mark.parametrize("pages", [0, 1, 3, -1])
def test_open_reader_reports_that_its_file_was_cut(home: Home, pages: int) -> None:
    with Index(home, 1 << 30) as index:
        for number in range(40):
            save(index, [number] * 5)
    with IndexReader(home) as reader:
        assert len(reader.segments()) == 40
        whole = cut_file(home, pages)
        require_cut_is_reported(reader.segments, reader.totals, reader.require_sound_pages)
        next(home.index.glob("*/data.mdb")).write_bytes(whole)
        assert len(reader.segments()) == 40


def test_other_schema_is_refused(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        index.transact(lambda tables: tables.put("meta", b"schema", b"99"))
    with pytest.raises(IndexSchemaError, match="newer"):
        Index(home, 1 << 30)
    with pytest.raises(IndexSchemaError, match="schema 99"):
        IndexReader(home)


def test_missing_index_is_reported(home: Home) -> None:
    with pytest.raises(IndexMissingError, match="no index"):
        IndexReader(home)


def test_missing_index_opened_exclusively_is_empty(home: Home) -> None:
    environment = LmdbEnvironment(home.index, writable=False, exclusive=True)
    with environment.read_transaction() as tables:
        assert not list(tables.segments()) and not tables.pending_deletions() and tables.count("requests") == 0
    assert environment.bytes_used() == environment.reader_check() == 0
    environment.close()


def test_tokens_are_stored_unchanged(index: Index) -> None:
    index.begin_save(SaveIntent(ROOT, MODEL, b"", LAYOUT))
    save(index, [0, 2**32 - 1, 5])
    stored = index.transact(lambda tables: tables.tokens(index.segments()[0].id))
    assert unpack_tokens(stored) == [0, 2**32 - 1, 5]
