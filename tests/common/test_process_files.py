"""Files of a process, and the lock of an instance, on a disk that takes nothing for a while."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from warmline_common import process_files
from warmline_common.process_files import ProcessFiles
from warmline_common.storage import disk, file_lock
from warmline_common.storage.file_lock import InstanceLock, LockedError, find_lock_holder, process_lock


class FullDisk:
    """Takes no new bytes and no new file while `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        for module, name in ((disk, "replace_file"), (disk, "overwrite_open"), (file_lock, "open_regular")):
            monkeypatch.setattr(module, name, self._wrap(getattr(module, name)))

    def _wrap(self, real: Any) -> Any:
        def write(*arguments: Any) -> Any:
            if self.is_full and arguments[1:] != (os.O_RDONLY,):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        return write


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_files_are_written_once_there_is_space(
    tmp_path: Path, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_files, "RETRY_INTERVAL_S", 0.001)
    state, pid = tmp_path / "backend-a.json", tmp_path / "backend-a.pid"

    async def run() -> None:
        files = ProcessFiles({state: "{}", pid: "1\n"})
        files.write()
        await asyncio.sleep(0.02)
        assert not state.exists() and not pid.exists()
        full_disk.is_full = False
        async with asyncio.timeout(30):
            while not pid.exists():  # noqa: ASYNC110  a file has no event
                await asyncio.sleep(0.001)
        assert state.read_text() == "{}"
        files.delete()

    asyncio.run(run())
    assert not list(tmp_path.iterdir())
    assert caplog.text.count("could not be written down") == 1


def test_instance_goes_on_without_its_lock_until_there_is_space(tmp_path: Path, full_disk: FullDisk) -> None:
    path, lock = tmp_path / "backend-a.lock", InstanceLock(tmp_path / "backend-a.lock")
    with lock.hold(0.0):
        with pytest.raises(OSError, match="No space left"):
            lock.complete()
        full_disk.is_full = False
        lock.complete()
        assert find_lock_holder(path) == str(os.getpid())
        lock.complete()
    assert not find_lock_holder(path)


def test_pid_is_written_into_a_held_lock_once_there_is_space(
    tmp_path: Path, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "backend-a.lock"
    monkeypatch.undo()
    path.touch()
    full_disk = FullDisk(monkeypatch)
    monkeypatch.setattr(file_lock, "open_regular", os.open)  # the file is there
    lock = InstanceLock(path)
    with lock.hold(0.0):
        assert path.read_text() == ""
        full_disk.is_full = False
        lock.complete()
        assert path.read_text() == f"{os.getpid()}\n"


def test_held_lock_of_an_instance_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "backend-a.lock"
    with process_lock(path), pytest.raises(LockedError), InstanceLock(path).hold(0.0):
        raise AssertionError("held twice")
