from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `families.served` keeps its models: one place, so that each is made and loaded once a session."""
    return tmp_path_factory.mktemp("families")
