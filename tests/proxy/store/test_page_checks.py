"""Checks of LMDB's pages: no sound file is refused, and no damage to the structure is missed."""

import os
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import lmdb
import pytest

from warmline_proxy.store.page_checks import (
    BRANCH,
    CHANGES_MAX,
    LEAF,
    MAP_BYTES_MAX,
    META_HEADER,
    OVERFLOW,
    PAGE_HEADER,
    find_page_flaw,
)

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def write_file(folder: Path, seed: int, transactions: int, value_bytes_max: int = 40_000) -> Path:
    """Write a file by random changes: deep tables, large values, free pages, and old readers that keep pages."""
    rng, readers = random.Random(seed), []
    with lmdb.open(str(folder), max_dbs=4, map_size=1 << 28, sync=False) as env:
        tables = [env.open_db(b"table %d" % number) for number in range(3)]
        for _ in range(transactions):
            readers.append(env.begin())
            if len(readers) > 3:
                readers.pop(0).abort()
            with env.begin(write=True) as txn:
                for _ in range(rng.choice([1, 5, 200])):
                    table = rng.choice(tables)
                    txn.put(
                        rng.randbytes(2), rng.randbytes(rng.choice([0, 1, 30, 1000, 2500, value_bytes_max])), db=table
                    )
                    txn.delete(rng.randbytes(2), db=table)
                if rng.random() < 0.1:
                    txn.drop(rng.choice(tables), delete=False)
            assert find_page_flaw(folder / "data.mdb") == ""
        for reader in readers:
            reader.abort()
    return folder / "data.mdb"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_file(tmp_path_factory.mktemp("sound"), 1, 12, value_bytes_max=5000).read_bytes()


@pytest.mark.parametrize("seed", range(2, 5))
def test_sound_files_have_no_flaw(tmp_path: Path, seed: int) -> None:
    file = write_file(tmp_path, seed, 20)
    assert find_page_flaw(file) == find_page_flaw(file, tables_only=True) == ""


def write_short_file(folder: Path) -> Path:
    """Write a file that ends before its last page: that was taken and left in one transaction."""
    with lmdb.open(str(folder), max_dbs=1, map_size=1 << 24) as env:
        table = env.open_db(b"table")
        for _ in range(4):  # leaves free pages, of which the next one makes its list of them
            with env.begin(write=True) as txn:
                txn.put(b"small", bytes(100), db=table)
        with env.begin(write=True) as txn:
            txn.put(b"large", bytes(40 * PAGE_BYTES), db=table)
            txn.delete(b"large", db=table)
        file = folder / "data.mdb"
        assert file.stat().st_size < env.info()["last_pgno"] * PAGE_BYTES
    return file


def test_file_without_its_last_free_pages_has_no_flaw(tmp_path: Path) -> None:
    file = write_short_file(tmp_path)
    assert find_page_flaw(file) == find_page_flaw(file, tables_only=True) == ""


def test_file_that_is_cut_is_checked_whole(tmp_path: Path, sound: bytes) -> None:
    file = tmp_path / "data.mdb"
    for size in random.Random(1).sample(range(0, len(sound), PAGE_BYTES // 2), 12):
        file.write_bytes(sound[:size])
        assert find_page_flaw(file, tables_only=True) == find_page_flaw(file)


def test_new_file_has_no_flaw(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path)).close()
    assert find_page_flaw(tmp_path / "data.mdb") == ""


def test_each_flip_of_page_structure_is_found(tmp_path: Path, sound: bytes) -> None:
    """Flips in a page that is used, not in one that is free: nobody reads that."""
    file, rng = tmp_path / "data.mdb", random.Random(1)
    used = (at for at in rng.sample(range(0, len(sound), PAGE_BYTES), 40) if _is_used(tmp_path, sound, at))
    for page in islice(used, 10):
        number, _, kind, lower, _ = PAGE_HEADER.unpack_from(sound, page)
        end = 16 if kind == OVERFLOW else lower
        for _ in range(6):
            at = rng.choice([byte for byte in range(page, page + end) if byte - page not in (8, 9)])  # unused padding
            damaged = bytearray(sound)
            damaged[at] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            assert find_page_flaw(file), (number, kind, at - page)


def _is_used(folder: Path, sound: bytes, at: int) -> bool:
    """True for the first page of a tree's page or of a large value: the file is damaged without it."""
    file = folder / "probe.mdb"
    file.write_bytes(sound[:at] + bytes(PAGE_BYTES) + sound[at + PAGE_BYTES :])
    number, _, kind, _, _ = PAGE_HEADER.unpack_from(sound, at)
    return number == at // PAGE_BYTES and kind in (BRANCH, LEAF, OVERFLOW) and bool(find_page_flaw(file))


def set_number(at: int, number: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + number.to_bytes(8, "little") + data[at + 8 :]


MAP_AT = PAGE_HEADER.size + META_HEADER.size - 8
LAST_PAGE_AT = PAGE_HEADER.size + META_HEADER.size + 2 * 48


@pytest.mark.parametrize(
    "damage",
    {
        "empty": lambda data: b"",
        "zeros": lambda data: bytes(len(data)),
        "cut": lambda data: data[: len(data) // 2],
        "cut in a meta": lambda data: data[: PAGE_BYTES + 20],
        "other program's": lambda data: b"garbage" * 1000,
        "metas swapped": lambda data: data[PAGE_BYTES : 2 * PAGE_BYTES] + data[:PAGE_BYTES] + data[2 * PAGE_BYTES :],
        "one meta twice": lambda data: data[PAGE_BYTES : 2 * PAGE_BYTES] + data[PAGE_BYTES:],
        "huge map": lambda data: set_number(MAP_AT, 2 * MAP_BYTES_MAX)(set_number(PAGE_BYTES + MAP_AT, 1 << 60)(data)),
        "huge last page": lambda data: set_number(LAST_PAGE_AT, 1 << 40)(
            set_number(PAGE_BYTES + LAST_PAGE_AT, 1 << 40)(data)
        ),
        "later last page": lambda data: set_number(LAST_PAGE_AT, 9000)(
            set_number(PAGE_BYTES + LAST_PAGE_AT, 9000)(data)
        ),
    }.items(),
    ids=lambda damage: damage[0],
)
def test_damaged_files_are_found(tmp_path: Path, sound: bytes, damage: tuple[str, Callable[[bytes], bytes]]) -> None:
    (tmp_path / "data.mdb").write_bytes(damage[1](sound))
    assert find_page_flaw(tmp_path / "data.mdb")


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere"), lambda path: None],
    ids=["folder", "FIFO", "dangling link", "missing"],
)
def test_other_kinds_of_files_are_reported_without_waiting(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "data.mdb")
    assert find_page_flaw(tmp_path / "data.mdb") and find_page_flaw(tmp_path / "data.mdb", tables_only=True)


def test_file_is_read_again_after_change(tmp_path: Path, sound: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that a process writes meanwhile look damaged; the metas tell."""
    file, reads = tmp_path / "data.mdb", 0
    file.write_bytes(sound[: 2 * PAGE_BYTES] + bytes(len(sound) - 2 * PAGE_BYTES))
    real = os.pread

    def change_meanwhile(descriptor: int, count: int, at: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads < 2 * CHANGES_MAX and at >= 2 * PAGE_BYTES:
            transactions = [int.from_bytes(sound[page + 144 : page + 152], "little") for page in (0, PAGE_BYTES)]
            assert abs(transactions[0] - transactions[1]) == 1
            file.write_bytes(set_number(MAP_AT, (1 << 28) + 4096 * reads)(sound))
        return real(descriptor, count, at)

    monkeypatch.setattr(os, "pread", change_meanwhile)
    assert find_page_flaw(file) == ""
