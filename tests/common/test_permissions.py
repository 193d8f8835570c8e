"""Permissions of a copied, restored or carelessly created home are private after a start."""

import stat
from pathlib import Path

import pytest

from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.permissions import tighten_permissions


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Home that is open to all users, with a file in each folder."""
    home = Home(tmp_path / "home")
    home.prepare()
    home.load_secret()
    for path in (home.keys, home.lock, home.segment_file("ab" * 16), home.index / "index.mdb", home.run / "proxy.pid"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for path in (home.root, *home.root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return home


def list_open_to_others(home: Home) -> list[str]:
    paths = (home.root, *home.root.rglob("*"))
    return sorted(path.name for path in paths if stat.S_IMODE(path.lstat().st_mode) & 0o077)


def test_open_permissions_are_tightened_and_reported_once(home: Home) -> None:
    count = len(list_open_to_others(home))
    message = str(tighten_permissions(home))
    assert list_open_to_others(home) == [] and stat.S_IMODE(home.segments.stat().st_mode) == 0o700
    assert message == f"{count} files and folders were open to others, such as {home.root}: private now"
    assert str(tighten_permissions(home)) == ""
    home.root.chmod(0o755)
    assert str(tighten_permissions(home)) == f"1 file or folder was open to others, such as {home.root}: private now"


def test_foreign_files_keep_permissions_and_are_reported(home: Home, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (home.models / "linked").symlink_to(elsewhere)
    (home.root / "holiday.jpg").touch(0o644)
    message = str(tighten_permissions(home))
    assert list_open_to_others(home) == ["holiday.jpg", "home", "linked"]
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    assert message.endswith(f"open to others, and left so: {home.root} (it holds other things, too)")


def test_failed_tightening_is_reported(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(disk, "set_mode", refuse)
    assert "left so: " in str(tighten_permissions(home)) and "(Operation not permitted)" in str(
        tighten_permissions(home)
    )
    assert "other things" not in str(tighten_permissions(home)), "there are none"


def test_missing_home_is_accepted(tmp_path: Path) -> None:
    assert str(tighten_permissions(Home(tmp_path / "none"))) == ""
