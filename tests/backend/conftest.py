from pathlib import Path

import pytest

from warmline_backend.scheduler import scheduler


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where `families.load_family` keeps its models, each made and loaded once a session."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def no_decode_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the order of steps repeatable: after slow chunks no decode steps are owed.

    test_fairness.py has a clock of its own.
    """
    monkeypatch.setattr(scheduler, "DECODE_OWED_MAX_S", 0.0)
