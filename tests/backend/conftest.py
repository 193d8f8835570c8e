from pathlib import Path

import pytest

from warmline_backend.scheduler import prefill, scheduler


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where `families.load_family` keeps its models, each made and loaded once a session."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def repeatable_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the order of steps repeatable, however long each takes on this machine.

    After slow chunks no decode steps are owed, and a batch of prompts has all that fit.  test_fairness.py has a clock
    of its own; tests/common/measurement/test_scheduling.py covers the sizes of batches.
    """
    monkeypatch.setattr(scheduler, "DECODE_OWED_MAX_S", 0.0)
    monkeypatch.setattr(prefill, "choose_batch_size", len)
