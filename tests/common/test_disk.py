"""Failures of each step that changes a home, and read-only homes."""

import errno
import fcntl
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest

from warmline_common.storage import disk
from warmline_common.storage import file_lock as lock_module
from warmline_common.storage.drafts import delete_drafts, make_draft_path
from warmline_common.storage.file_lock import LockedError, find_lock_holder, process_lock, read_pid
from warmline_common.storage.home import Home, describe_unusable_home


def raise_os_error(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename"])
def test_failed_write_leaves_no_file(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, step, raise_os_error)
    with pytest.raises(OSError, match="Input/output"):
        disk.write_durable(tmp_path / "a" / "file", [b"one", b"two"])
    assert list((tmp_path / "a").iterdir()) == []


def test_first_failure_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "write", full)
    monkeypatch.setattr(disk, "delete", raise_os_error)
    with pytest.raises(OSError, match="No space"):
        disk.write_durable(tmp_path / "file", [b"one"])


def test_written_file_is_complete_and_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    assert disk.write_durable(path, [b"one", memoryview(b"two"), b""]) == 6
    assert path.read_bytes() == b"onetwo"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    disk.delete_tree(tmp_path / "a")
    disk.delete_tree(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_large_file_is_sent_to_the_disk_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    start = disk.start_write_back

    def record(file: FileIO, offset: int, bytes_count: int) -> None:
        assert os.fstat(file.fileno()).st_size >= offset + bytes_count, "it is written"
        sent.append((offset, bytes_count))
        start(file, offset, bytes_count)

    monkeypatch.setattr(disk, "WRITE_BACK_BYTES", 10)
    monkeypatch.setattr(disk, "start_write_back", record)
    disk.write_durable(tmp_path / "file", [b"123456", b"7890", b"", b"x" * 25, b"last"])
    assert sent == [(0, 10), (10, 25)]
    assert (tmp_path / "file").read_bytes() == b"1234567890" + b"x" * 25 + b"last"


@pytest.mark.parametrize("refusal", [0, errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.EIO])
def test_sync_uses_full_fsync_where_available(refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[str] = []

    def fake_fcntl(descriptor: int, command: int) -> int:
        assert os.fstat(descriptor) and command == 51
        syncs.append("drive")
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)  # macOS has it
    monkeypatch.setattr(fcntl, "fcntl", fake_fcntl)
    monkeypatch.setattr(os, "fsync", lambda _: syncs.append("system"))
    if refusal == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            disk.sync_folder(tmp_path)
        assert syncs == ["drive"]
        return
    disk.write_durable(tmp_path / "file", [b"one"])
    assert syncs == (["drive", "system"] if refusal else ["drive"]) * 2, "the file, and its folder"


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "link to a FIFO": lambda path: (os.mkfifo(f"{path}-fifo"), path.symlink_to(f"{path}-fifo")),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_file_is_neither_read_nor_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    IRREGULAR[kind](path)
    for use in (disk.read_file, disk.open_to_read, *([] if "nothing" in kind else [enter_lock])):
        with pytest.raises(OSError, match=r"no regular file: '.*/file'|directory"):
            use(path)
    assert read_pid(path) is None and find_lock_holder(path) == ""


def enter_lock(path: Path) -> None:
    with process_lock(path):
        pass


def test_small_file_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, disk.SMALL_FILE_BYTES_MAX):
        path.write_bytes(b"x" * size)
        assert len(disk.read_file(path)) == size
    path.write_bytes(b"x" * (disk.SMALL_FILE_BYTES_MAX + 1))
    with pytest.raises(OSError, match=r"more than 4 MiB: .*/file"):
        disk.read_file(path)
    os.truncate(path, 1 << 40)  # sparse
    with pytest.raises(OSError, match="more than 4 MiB"):
        disk.read_file(path)


@pytest.mark.parametrize("name", ["secret", "home.lock", "run/backend.lock"])
def test_irregular_file_of_home_is_described(tmp_path: Path, name: str) -> None:
    home = Home(tmp_path)
    home.prepare()
    os.mkfifo(home.root / name)
    with pytest.raises(OSError, match="no regular file") as failed:
        home.load_secret() if name == "secret" else home.prepare()
    assert f"{home.root}/{name}: it is no regular file" in describe_unusable_home(home, failed.value)


def test_secret_is_created_once_without_draft(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    home.prepare()
    (home.root / ".secret.x.tmp").write_text("half")
    secret = home.load_secret()
    assert len(secret) == 64 and home.load_secret() == secret
    assert not list(home.root.glob(".*"))
    for damaged in (b"", b" \n", b"\xff\xfe", b"a\nb"):  # nobody could prove himself by that, and none would know why
        (home.root / "secret").write_bytes(damaged)
        with pytest.raises(OSError, match="secret holds no secret; delete it"):
            home.load_secret()


def test_lock_holder_unknown_without_lock_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with process_lock(tmp_path / "lock"):
        assert find_lock_holder(tmp_path / "lock") == str(os.getpid())
    assert find_lock_holder(tmp_path / "lock") == ""
    monkeypatch.setattr(lock_module.fcntl, "flock", raise_os_error)
    assert find_lock_holder(tmp_path / "lock") == ""


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.open

    def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, mode)

    monkeypatch.setattr(lock_module.os, "open", refusing)


def test_read_only_home_is_locked(tmp_path: Path, read_only: None) -> None:
    path = tmp_path / "lock"
    path.write_text("4711\n")
    with process_lock(path), pytest.raises(LockedError, match="4711"), process_lock(path):
        raise AssertionError("two owners")
    assert path.read_text() == "4711\n"


def test_never_writable_home_needs_no_lock(tmp_path: Path, read_only: None) -> None:
    with process_lock(tmp_path / "lock"):
        assert not list(tmp_path.iterdir())


def test_small_file_is_overwritten_in_place_on_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.replace_file(tmp_path / "file", "a longer text")
    place = (tmp_path / "file").stat().st_ino
    monkeypatch.setattr(disk, "write", full)
    disk.replace_file(tmp_path / "file", "short")
    assert (tmp_path / "file").read_text() == "short" and (tmp_path / "file").stat().st_ino == place
    with pytest.raises(OSError, match="No space"):
        disk.replace_file(tmp_path / "new", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lock_is_held_on_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with process_lock(tmp_path / "lock"):
        assert find_lock_holder(tmp_path / "lock") == "?"
        with pytest.raises(LockedError), process_lock(tmp_path / "lock"):
            pass


def test_tree_is_deleted_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("tree", "link", "missing"):
        disk.delete_tree(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


def test_unusable_home_is_described(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "segments").write_bytes(b"x")
    texts = {"link": "which does not exist; make that", "home": "segments: File exists; make it writable"}
    for name, text in texts.items():
        home = Home(tmp_path / name)
        with pytest.raises(OSError, match="exist") as failed:
            home.prepare()
        assert text in describe_unusable_home(home, failed.value)


# ---- drafts


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "ab" / f"{'ab' * 16}.safetensors"
    path.parent.mkdir()
    path.touch()
    return path


def test_drafts_of_all_backends_are_deleted(tmp_path: Path, segment: Path) -> None:
    for draft in (make_draft_path(segment), make_draft_path(segment, "large"), segment.with_name(".ab.01234567.tmp")):
        draft.touch()
    assert delete_drafts(tmp_path) == 3
    assert list(segment.parent.iterdir()) == [segment]


def test_only_drafts_of_owner_are_deleted(tmp_path: Path, segment: Path) -> None:
    others = [make_draft_path(segment, owner) for owner in ("large-2", "2", "small", "")]
    for path in (*others, *(make_draft_path(segment, "large") for _ in range(2))):
        path.touch()
    assert delete_drafts(tmp_path, "large") == 2
    assert {*segment.parent.iterdir()} == {segment, *others}


def test_durable_file_is_written_to_named_draft(tmp_path: Path, segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[Path] = []
    rename = disk.rename
    monkeypatch.setattr(disk, "rename", lambda old, new: (renamed.append(old), rename(old, new)))
    draft = make_draft_path(segment, "large")
    disk.write_durable(segment, [b"rows"], None, draft)
    assert renamed == [draft] and segment.read_bytes() == b"rows"
