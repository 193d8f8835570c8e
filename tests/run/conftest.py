"""Users with fake service managers, each with a home of their own."""

from pathlib import Path

import pytest

from support.run.fake_managers import FakeUser


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeUser:
    return FakeUser(tmp_path, monkeypatch, "launchctl")


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeUser:
    return FakeUser(tmp_path, monkeypatch, "systemctl")
