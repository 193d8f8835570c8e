"""Startup after kills: leftovers are reconciled; and a purge leaves nothing behind."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.index.indexes import ROOT, count_matched, make_home, plan_save, save, write_plan
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.__main__ import reconcile_index
from warmline_proxy.home_lock import HomeLockedError, home_lock
from warmline_proxy.index.index import Index, IndexReader, IndexStoreError
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.purge import purge, select_purge
from warmline_proxy.store.rows import PurgeRequest

A = list(range(100_000, 103_000))
TESTS = str(Path(__file__).parents[3])

CHILD = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from support.index import indexes as helpers
from warmline_proxy.index.index import Index
from warmline_common.storage.home import Home
index = Index(Home(Path(sys.argv[1])), 1 << 30)
plan = helpers.plan_save(index, [*range(100_000, 103_000), *range(3000)], checkpoints=[3500])
"""
STEPS = {
    "planned": "",
    "half written": "helpers.write_plan(index.home, plan); index.home.segment_file(plan.file_ids[-1]).unlink()",
    "written": "helpers.write_plan(index.home, plan)",
    "committed": "helpers.commit_save(index, plan)",
    "evicted": "helpers.commit_save(index, plan); index.budget_bytes = 1; index.sweep = lambda: 0; index.make_room()",
    "aside": "import warmline_proxy.store.files as f; f.move_to_quarantine = lambda *a: 0; "
    "helpers.commit_save(index, plan); index.quarantine(plan.segments[0].id, 'checksum')",
}


@pytest.mark.parametrize("step", STEPS)
def test_kill_during_save_loses_only_that_save(home: Home, step: str) -> None:
    with Index(home, 1 << 30) as index:
        reconcile(index)
        save(index, A)
    code = CHILD + STEPS[step] + "\nos.kill(os.getpid(), signal.SIGKILL)\n"
    child = subprocess.run([sys.executable, "-c", code, str(home.root), str(os.getpid()), TESTS], check=False)
    assert child.returncode == -signal.SIGKILL
    with Index(home, 1 << 30) as index:
        counts = reconcile(index)
        assert verify_index(index, deep=True) == []
        assert count_matched(index, [*A, *range(3000)]) == {"committed": 6000, "evicted": 0}.get(step, 3000)
        if step in ("planned", "half written", "written"):
            assert counts.saves_rolled_back == 1
        if step == "evicted":
            assert counts.files_doomed == 3
        if step == "aside":
            assert len(index.quarantined()) == 2
        assert index.totals().bytes_writing == index.totals().bytes_doomed == 0
        again = reconcile(index)
        assert not any(getattr(again, name) for name in again.__struct_fields__)


def test_startup_reconciles_files_and_rows(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        reconcile(index)
        save(index, A[:1500], checkpoints=[1000])
        save(index, A, checkpoints=[2000])
        save(index, [1, *A[:1500]])
        save(index, [2, *A[:1500]])
        first, second = (ref.id for ref in index.match_prefix(ROOT, pack_tokens(A), 3000).chain)
        damaged = index.match_prefix(ROOT, pack_tokens([1]), 1).chain[0].id
    home.segment_file(second).unlink()
    os.truncate(home.segment_file(damaged), 100)
    stray = home.segment_file("ab" * 16)
    stray.parent.mkdir(exist_ok=True)  # where a segment's random name begins alike, it is there already
    stray.parent.chmod(0o755)
    stray.write_bytes(b"x")
    home.segment_file(first).with_name(f".{first}.12.tmp").write_bytes(b"x")
    (home.segments / "quarantine").mkdir(exist_ok=True)
    (home.segments / "quarantine" / f"{'cd' * 16}.safetensors").write_bytes(b"x")
    with Index(home, 1 << 30) as index:
        assert {finding.what for finding in verify_index(index)} == {"missing", "truncated", "orphan", "mode"}
        counts = reconcile(index)
        assert counts.rows_without_file == 2 and counts.rows_of_other_size == 1
        assert counts.files_temporary == 1 and counts.files_without_row == 2 and counts.modes_set > 0
        assert verify_index(index, deep=True) == []
        assert [count_matched(index, ids) for ids in (A, [1, *A], [2, *A])] == [1500, 0, 1501]
        assert [row.position for row in index.snapshot().checkpoints.values()] == [1000]
        (aside,) = index.quarantined()
        assert (aside.id, aside.reason, aside.bytes_on_disk) == (damaged, "truncated", 100)
        assert index.match_prefix(ROOT, pack_tokens([1]), 1).end_reason == "quarantined (truncated) after token 0"


def test_smaller_budget_holds_from_start(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, A)
        save(index, [1, *A])
        budget = index.totals().bytes_used - 1
    with Index(home, budget) as index:
        assert reconcile(index).evicted == 1
        assert index.totals().bytes_used <= budget


def test_home_has_one_lock_holder(home: Home) -> None:
    hold = "import sys\nfrom pathlib import Path\nfrom warmline_proxy.home_lock import home_lock\n"
    hold += "from warmline_common.storage.home import Home\n"
    hold += "with home_lock(Home(Path(sys.argv[1]))):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(home.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with pytest.raises(HomeLockedError, match=f"process {child.pid}"), home_lock(home):
            pass
        child.kill()
        child.wait()
        with home_lock(home):
            pass


def test_other_process_reads_during_writes(home: Home) -> None:
    code = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support.index import indexes as helpers
from warmline_proxy.index.index import IndexReader
from warmline_proxy.index.recovery.verify import verify_index
from warmline_common.storage.home import Home
with IndexReader(Home(Path(sys.argv[1]))) as reader:
    for line in sys.stdin:
        print(json.dumps([reader.totals().segments, len(verify_index(reader)), len(reader.sessions())]), flush=True)
"""
    with (
        Index(home, 1 << 30) as index,
        subprocess.Popen(
            [sys.executable, "-c", code, str(home.root), TESTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        plan = None
        for number in range(1, 5):
            save(index, [number, *A[:1100]])
            plan = plan_save(index, [number, *A[:1200]])
            write_plan(home, plan)  # its files are on disk, but not in the tree
            child.stdin.write("\n")
            child.stdin.flush()
            assert json.loads(child.stdout.readline()) == [number, 0, number]
            if number % 2:
                index.compact()  # what follows is written into another file
        child.stdin.close()
        assert child.wait() == 0
        assert plan is not None


# --- purge ---


def list_files(home: Home) -> bytes:
    return b"".join(path.read_bytes() for path in home.root.rglob("*") if path.is_file())


def make_needle(ids: list[int]) -> bytes:
    return pack_tokens(ids)


def test_purge_leaves_no_bytes(home: Home) -> None:
    """Tokens of the purged conversation are in no file of the home any more, slack of pages included."""
    secret, kept = list(range(700_000, 700_900)), list(range(800_000, 800_900))
    with Index(home, 1 << 30) as index:
        for length in (20, 60, 200, 900):  # small rows lie inside pages, among others
            save(index, secret[:length], may_replace=False, turn_end=10)
            save(index, kept[:length], may_replace=False, turn_end=10)
        snapshot, ids = index.snapshot(), _list_ids(index, secret)
        session = next(row for row in snapshot.sessions.values() if snapshot.segment_path(row.leaf)[0].id in ids).id
        assert make_needle(secret[5:8]) in list_files(home)
        reply = purge(index, PurgeRequest(session=session, dry_run=True))
        assert reply.dry_run and len(reply.segments) == 4 and count_matched(index, secret) == 900
        reply = purge(index, PurgeRequest(session=session))
        assert len(reply.segments) == 4 and reply.sessions == [session]
        assert count_matched(index, secret) == 0 and count_matched(index, kept) == 900
        left = list_files(home)
        for at in range(0, 890, 2):
            assert make_needle(secret[at : at + 3]) not in left
        assert make_needle(kept[5:8]) in left
        assert session.encode() not in left
        assert verify_index(index, deep=True) == []
        save(index, secret)  # the new generation takes writes
        assert [path.name for path in home.index.iterdir()] == ["2"]
    with Index(home, 1 << 30) as index:
        assert count_matched(index, secret) == 900


def _list_ids(index: Index, ids: list[int]) -> set[str]:
    return {ref.id for ref in index.match_prefix(ROOT, pack_tokens(ids), len(ids)).chain}


def test_purge_keeps_shared_segments(index: Index) -> None:
    system = A[:1100]
    first = save(index, [*system, *range(300)], turn_end=1400).session
    second = save(index, [*system, *range(5000, 5300)], turn_end=1400).session
    assert save(index, [*system, *range(290), 7, 7], turn_end=1392).session not in (first, second)
    abandoned = save(index, [*system, *range(5000, 5300), 1, 1], turn_end=1401, may_replace=False)
    assert abandoned.session == second
    assert save(index, [*system, *range(5000, 5300), 1, 2], turn_end=1402).session == second
    reply = purge(index, PurgeRequest(session=second))
    assert len(reply.segments) == 3  # its own tail, the answer that it went on with, and the one that it left
    assert count_matched(index, [*system, *range(300)]) == 1400
    assert count_matched(index, [*system, *range(5000, 5300)]) == 1100
    assert purge(index, PurgeRequest(session=second)).segments == []


def test_purge_by_model_age_and_everything(index: Index) -> None:
    save(index, A[:1500], checkpoints=[100])
    save(index, [1, *A[:1500]])
    index.quarantine(index.match_prefix(ROOT, pack_tokens([1]), 1).chain[0].id, "checksum")
    assert purge(index, PurgeRequest(model="other")).segments == []
    assert purge(index, PurgeRequest(older_than_s=3600)).bytes_freed == 0
    used = index.totals()
    reply = purge(index, PurgeRequest(model="model-a", dry_run=True))
    assert reply.bytes_freed == used.bytes_segments + used.bytes_checkpoints + used.bytes_quarantined
    reply = purge(index, PurgeRequest(older_than_s=0))
    assert len(reply.segments) == len(reply.checkpoints) == len(reply.quarantined) == len(reply.sessions) == 1
    save(index, A[:1500])
    running = plan_save(index, [9, *A])
    reply = purge(index, PurgeRequest(everything=True))
    assert len(reply.segments) == 1
    assert index.totals().bytes_used == index.totals().bytes_index
    assert index.transact(lambda tables: tables.save_plan(running.id)) is None
    assert [path for path in index.home.segments.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "request_", [PurgeRequest(), PurgeRequest(session="a", model="b"), PurgeRequest(everything=True, older_than_s=1.0)]
)
def test_purge_request_has_one_selector(index: Index, request_: PurgeRequest) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        select_purge(index.snapshot(), request_, 0.0)


def test_killed_compaction_loses_nothing(tmp_path: Path) -> None:
    home = make_home(tmp_path / "h")
    with Index(home, 1 << 30) as index:
        save(index, A)
        (home.index / ".2.tmp").mkdir()
        (home.index / ".2.tmp" / "data.mdb").write_bytes(b"half")
    with Index(home, 1 << 30) as index:
        assert not (home.index / ".2.tmp").exists()
        assert count_matched(index, A) == 3000
        with IndexReaderInThread(index) as before:
            index.compact()
            assert before() == 3000  # a snapshot taken before goes on
    (home.index / "1").mkdir()  # killed after the rename, before the old one went
    with Index(home, 1 << 30) as index:
        assert [path.name for path in home.index.iterdir()] == ["2"]
        assert count_matched(index, A) == 3000
    with IndexReader(home) as reader:
        assert reader.totals().segments == 1


def test_failed_compaction_keeps_index(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(home, 1 << 30) as index:
        save(index, A)
        whole = index._environment._open

        def too_many_files(path: Path) -> object:
            if path.name == "2":
                raise IndexStoreError("Too many open files")
            return whole(path)

        with monkeypatch.context() as planted:
            planted.setattr(index._environment, "_open", too_many_files)
            with pytest.raises(IndexStoreError, match="Too many"):
                index.compact()
        assert [path.name for path in home.index.iterdir()] == ["1"]
        save(index, [7, *A])
    with Index(home, 1 << 30) as index:
        assert (count_matched(index, A), count_matched(index, [7, *A])) == (3000, 3001)


def test_lmdb_mapped_pages_have_disk_blocks(home: Home) -> None:
    """A first touch of a page without a block would end the process on a full disk, not raise."""
    with Index(home, 1 << 30) as index:
        save(index, A)
        index.compact()
        lock = (home.index / "2" / "lock.mdb").stat()
        assert lock.st_blocks * 512 >= lock.st_size > 64 * 500
    os.truncate(home.index / "2" / "lock.mdb", 0)  # as an earlier version left it
    os.truncate(home.index / "2" / "lock.mdb", lock.st_size)
    with Index(home, 1 << 30) as index:
        lock = (home.index / "2" / "lock.mdb").stat()
        assert lock.st_blocks * 512 >= lock.st_size or not hasattr(os, "posix_fallocate")
        assert count_matched(index, A) == 3000


@pytest.mark.parametrize("undone", [True, False])
def test_undurable_compaction_loses_no_later_writes(home: Home, undone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later writes must be where the next start looks for them."""
    with Index(home, 1 << 30) as index:
        save(index, A)
        rename = disk.rename

        def failing(*paths: Path) -> None:
            if (home.index / "2").exists():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if len(paths) == 2:
                rename(*paths)

        with monkeypatch.context() as planted:
            planted.setattr(disk, "sync_folder", failing)
            if not undone:
                planted.setattr(disk, "rename", failing)
            with pytest.raises(IndexStoreError, match="error"):
                index.compact()
        save(index, [7, *A])
    with Index(home, 1 << 30) as index:
        assert (count_matched(index, A), count_matched(index, [7, *A])) == (3000, 3001)


def test_read_only_start_serves_stored_data(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(home, 1 << 30) as index:
        reconcile(index)
        save(index, A)
    stray = home.segment_file("ab" * 16)
    stray.parent.mkdir(exist_ok=True, mode=0o700)
    stray.write_bytes(b"x")
    for name in ("create", "delete"):
        monkeypatch.setattr(disk, name, raise_disk_full)
    with Index(home, 1 << 30) as index:
        reconcile_index(index)
        assert index.read_only_code == "ENOSPC" and count_matched(index, A) == 3000
        with pytest.raises(IndexStoreError) as refused:
            save(index, [1, *A])
        assert refused.value.code == "ENOSPC"
        monkeypatch.undo()
        assert index.reopen()
        assert reconcile(index).files_without_row == 1
        save(index, [1, *A])
        assert verify_index(index, deep=True) == []


def raise_disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class IndexReaderInThread:
    """Reader that keeps a read transaction open during the block."""

    def __init__(self, index: Index) -> None:
        self._context = index._environment.read_transaction()

    def __enter__(self):  # type: ignore[no-untyped-def]
        tables = self._context.__enter__()
        return lambda: sum(row.end - row.start for row in tables.segments())

    def __exit__(self, *error) -> None:  # type: ignore[no-untyped-def]
        self._context.__exit__(*error)


def test_rebuilt_index_has_only_file_content(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    with Index(home, 1 << 30) as index:
        save(index, A)
    (data,) = home.index.glob("*/data.mdb")
    data.write_bytes(b"garbage" * 10_000)
    with pytest.raises(IndexStoreError, match="damaged"):
        IndexReader(home)
    with Index(home, 1 << 30) as index:
        reconcile(index)
        assert count_matched(index, A) == len(A) and verify_index(index, deep=True) == []
        save(index, [*A, 1])
    assert b"garbage" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
