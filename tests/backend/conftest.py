from pathlib import Path

import pytest

from warmline_backend.scheduler import scheduler


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `families.served` keeps its models: one place, so that each is made and loaded once a session."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def nothing_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a chunk takes on a busy machine, no more steps are decoded after it: who is how far is the same in
    every run.  test_fairness.py has a clock of its own.
    """
    monkeypatch.setattr(scheduler, "DECODE_OWED_MAX_S", 0.0)
