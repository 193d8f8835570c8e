"""Export of conversations from one home and import into another."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from support.index.archives import (
    FINGERPRINT,
    KNOWN,
    STATES,
    TALK,
    check_content,
    export_session,
    import_session,
    list_files,
    save,
    save_conversations,
)
from support.index.indexes import BUDGET, make_home, make_turn
from warmline_common.protocol.tokens import namespace, pack_tokens, unpack_tokens
from warmline_common.storage import disk
from warmline_common.storage.drafts import delete_drafts
from warmline_proxy.archive import importer
from warmline_proxy.archive.exporter import Exporter
from warmline_proxy.archive.importer import KnownModels, find_known_models, import_archive
from warmline_proxy.archive.manifest import MANIFEST
from warmline_proxy.archive.reader import read_archive
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.index.index import DiskBudgetError, Index
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import PurgeRequest, SavePlan


@pytest.mark.parametrize(("old_tenant", "new_tenant"), [("", ""), ("a", "b")])
def test_exported_conversation_is_imported_whole(index: Index, other: Index, old_tenant: str, new_tenant: str) -> None:
    session = save_conversations(index, old_tenant)
    data = export_session(index, session)
    reply = import_session(other, data, new_tenant)
    assert (reply.tokens, reply.tokens_known, reply.segments, reply.checkpoints) == (300, 0, 3, 3)
    check_content(other, TALK, new_tenant, STATES)
    row = other.session(reply.session)
    assert row is not None and (row.client, row.tokens, row.turn_end, row.requests) == ("mine", 300, 299, 3)
    assert other.segments()[0].root == namespace(FINGERPRINT, new_tenant)
    assert reconcile(other).files_without_row == 0


def test_archive_is_tar_of_one_conversation_without_tenant(index: Index) -> None:
    session = save_conversations(index, "tenant-a")
    data = export_session(index, session)
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        names = opened.getnames()
    assert names[0] == MANIFEST and len(names) == 7
    assert pack_tokens([7, 8, 9]) not in data and b"secret-other" not in data
    assert namespace(FINGERPRINT, "tenant-a").hex().encode() not in data, "nothing names the tenant"


def test_rows_of_other_conversations_are_not_exported(index: Index, other: Index) -> None:
    save_conversations(index)
    other_session = next(row.id for row in index.sessions() if row.client == "secret-other")
    reply = import_session(other, export_session(index, other_session))
    assert reply.tokens == 253
    check_content(other, [*TALK[:250], 7, 8, 9], checkpoints=[100, 200])
    assert other.match_prefix(namespace(FINGERPRINT), pack_tokens(TALK), 300).tokens == 250
    assert max(row.end for row in other.segments()) == 253


def test_import_skips_stored_tokens(index: Index, other: Index) -> None:
    data = export_session(index, save_conversations(index))
    save(other, TALK[:170], [100])  # ends within the archive's second segment
    before = {row.id for row in other.segments()}
    reply = import_session(other, data)
    assert (reply.tokens_known, reply.segments, reply.checkpoints) == (170, 2, 2)
    assert before <= {row.id for row in other.segments()}
    check_content(other, TALK, checkpoints=STATES)
    again = import_session(other, data)
    assert (again.tokens_known, again.segments, again.bytes_written) == (300, 0, 0)
    assert again.session == reply.session
    row = other.session(reply.session)
    assert row is not None and row.requests == 1 + 3, "stored tokens are not counted again"
    save(other, [*TALK, *range(50)], client="mine")
    assert import_session(other, data).session == reply.session and len(other.sessions()) == 1, (
        "nor where the conversation has grown"
    )


def test_import_continues_shared_prefix_of_other_conversation(index: Index, other: Index) -> None:
    save(other, [*TALK[:130], 1, 2, 3, 4])
    reply = import_session(other, export_session(index, save_conversations(index)))
    assert reply.tokens_known == 130
    check_content(other, TALK, checkpoints=STATES)
    check_content(other, [*TALK[:130], 1, 2, 3, 4], checkpoints=[100])


def test_import_restores_purged_conversation(index: Index) -> None:
    session = save_conversations(index)
    data = export_session(index, session)
    purge(index, PurgeRequest(everything=True))
    assert index.segments() == [] and list_files(index.home) == {}
    import_session(index, data)
    check_content(index, TALK, checkpoints=STATES)


def test_import_adds_sampled_turns_and_replaces_none(index: Index, other: Index) -> None:
    session = save_conversations(index)
    root = namespace(FINGERPRINT)
    for number in (1, 2):
        index.record_turn(make_turn(number, root=root, session=session))
    index.record_turn(make_turn(3, root=root, session="another"))
    index.flush()
    mine = make_turn(2, root=namespace(FINGERPRINT, "t"), tokens=pack_tokens([99]))
    other.record_turn(mine)
    other.flush()
    reply = import_session(other, export_session(index, session), "t")
    assert reply.turns == 1
    calls = [f"call_{number:024x}" for number in (1, 2, 3)]
    found = other.turns(namespace(FINGERPRINT, "t"), calls)
    assert [unpack_tokens(row.tokens) for row in found] == [[1], [99]]
    assert found[0].session == reply.session


# ---- exports that are refused


def test_export_of_unknown_session_is_refused(index: Index) -> None:
    with pytest.raises(ArchiveError, match="nothing is stored of session ffff"):
        Exporter(index, "ffff")


@pytest.mark.parametrize("damage", ["missing", "tensor", "swapped"])
def test_export_of_damaged_conversation_is_refused(index: Index, damage: str) -> None:
    session = save_conversations(index)
    row = index.snapshot().segment_path(index.sessions()[0].leaf)[0]
    path = index.home.segment_file(row.id)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "tensor":
        path.write_bytes(whole[:-60] + bytes([whole[-60] ^ 1]) + whole[-59:])
    else:
        path.write_bytes(
            index.home.segment_file(index.snapshot().segment_path(index.sessions()[0].leaf)[1].id).read_bytes()
        )
    with pytest.raises(ArchiveError, match="cachectl verify --deep"):
        export_session(index, session)
    path.write_bytes(whole)
    path.chmod(0o600)


def test_export_completes_after_eviction(index: Index, other: Index) -> None:
    session = save_conversations(index)
    with Exporter(index, session) as export:
        purge(index, PurgeRequest(everything=True))
        data = b"".join(export.read_chunks())
    import_session(other, data)
    check_content(other, TALK, checkpoints=STATES)


# ---- imports that are refused, or interrupted


def test_import_of_other_model_needs_anyway(index: Index, other: Index) -> None:
    data = export_session(index, save_conversations(index))
    elsewhere = KnownModels(fingerprints={"9" * 64}, description="the model served here is tiny, 999999999999")
    with pytest.raises(ArchiveError, match=r"model-a, fingerprint 0123456789ab, and the model served .* --anyway"):
        import_session(other, data, known=elsewhere)
    assert list_files(other.home) == {}
    assert import_session(other, data, known=elsewhere, anyway=True).tokens == 300
    check_content(other, TALK, checkpoints=STATES)


def test_known_models_are_read_from_stored_files(index: Index, other: Index) -> None:
    assert find_known_models(other).fingerprints == {}
    save(other, [1, 2, 3])
    known = find_known_models(other)
    assert list(known.fingerprints) == [FINGERPRINT] and "model-a 0123456789ab" in known.description
    assert import_session(other, export_session(index, save_conversations(index)), known=known).tokens == 300


def test_import_beyond_budget_is_refused_and_evicts_nothing(index: Index, other: Index) -> None:
    data = export_session(index, save_conversations(index))
    save(other, [5] * 50)
    other.budget_bytes = other.totals().bytes_used + 1000
    with pytest.raises(DiskBudgetError, match=r"bytes don't fit into \d+"):
        import_session(other, data)
    assert other.match_prefix(namespace(FINGERPRINT), pack_tokens([5] * 50), 50).tokens == 50, (
        "nothing was evicted in vain"
    )
    other.budget_bytes = BUDGET
    import_session(other, data)


def test_import_without_disk_space_is_refused_with_figures(
    index: Index, other: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = export_session(index, save_conversations(index))
    monkeypatch.setattr(importer, "FREE_BYTES_MIN", 1 << 60)
    with pytest.raises(DiskBudgetError, match=r"takes \d+ bytes, and the disk of .* has \d+ left"):
        import_session(other, data)


def test_failed_write_leaves_no_files(index: Index, other: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    data = export_session(index, save_conversations(index))
    written = []

    def failing(*arguments: Any) -> Any:
        written.append(arguments)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    real = disk.write_durable
    monkeypatch.setattr(disk, "write_durable", failing)
    with pytest.raises(OSError, match="No space"):
        import_session(other, data)
    assert list_files(other.home) == {} and other.totals().bytes_writing == 0 and other.segments() == []


def test_import_survives_deletion_of_drafts_by_starting_backend(
    index: Index, other: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, sync = export_session(index, save_conversations(index)), disk.sync

    def swept(file: Any) -> None:
        monkeypatch.setattr(disk, "sync", sync)
        assert delete_drafts(other.home.segments) == 1
        sync(file)

    monkeypatch.setattr(disk, "sync", swept)
    import_session(other, data)
    check_content(other, TALK, checkpoints=STATES)


def test_import_reserves_the_size_of_its_files(index: Index, other: Index) -> None:
    """A segment of one row is nearly all header, so bytes per row vary."""
    save(index, TALK[:299])
    data = export_session(index, save(index, TALK))
    assert sorted(row.end - row.start for row in index.segments()) == [1, 299]
    other.budget_bytes = other.totals().bytes_used + len(data) + 100_000
    import_session(other, data)
    check_content(other, TALK)


def test_next_start_rolls_back_killed_import(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with files and plan written; tests/crash kills it at each disk operation."""
    data, home = export_session(index, save_conversations(index)), make_home(tmp_path / "killed")

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    with Index(home, BUDGET) as fresh:
        reconcile(fresh)
    with Index(home, BUDGET) as victim, monkeypatch.context() as patched:
        patched.setattr(Index, "commit_save", killed)
        patched.setattr(Index, "abort_save", lambda *_: None)
        with pytest.raises(Killed):
            import_session(victim, data)
        assert victim.segments() == [] and len(list_files(home)) == 6
    with Index(home, BUDGET) as survivor:
        assert reconcile(survivor).saves_rolled_back == 1
        assert list_files(home) == {} and verify_index(survivor, deep=True) == []


def test_import_retries_after_concurrent_save(index: Index, other: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    data, begin = export_session(index, save_conversations(index)), Index.begin_save

    def overtaken(self: Index, *arguments: Any, **options: Any) -> SavePlan | None:
        plan = begin(self, *arguments, **options)
        monkeypatch.setattr(Index, "begin_save", begin)
        save(self, TALK[:60])
        return plan

    monkeypatch.setattr(Index, "begin_save", overtaken)
    assert import_session(other, data).tokens_known == 60
    check_content(other, TALK, checkpoints=STATES)


def test_progress_callback_can_end_import(index: Index, other: Index) -> None:
    data = export_session(index, save_conversations(index))
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if done > total * 2 / 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        import_archive(other, read_archive(io.BytesIO(data)), "", KNOWN, progress=progress)
    assert seen[-1][0] <= seen[-1][1] and list_files(other.home) == {} and other.segments() == []
