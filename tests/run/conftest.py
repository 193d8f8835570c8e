"""The users whose service managers are ours, each with a home of their own."""

from pathlib import Path

import pytest

from support.run.fake_managers import User


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(tmp_path, monkeypatch, "launchctl")


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(tmp_path, monkeypatch, "systemctl")
