from collections.abc import Iterator
from pathlib import Path

import pytest

from support.index.indexes import BUDGET, make_home
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.verify import verify_index


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home")


@pytest.fixture
def index(home: Home) -> Iterator[Index]:
    """Index whose invariants are checked after every test."""
    with Index(home, BUDGET) as index:
        yield index
        assert verify_index(index, deep=True) == []


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Index]:
    """Another home's index, whose invariants are checked after every test."""
    with Index(make_home(tmp_path / "other"), BUDGET) as index:
        yield index
        assert verify_index(index, deep=True) == []
