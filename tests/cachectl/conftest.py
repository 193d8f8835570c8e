"""A home with something in it."""

from pathlib import Path

import pytest

from support.cachectl.homes import make_filled_home
from warmline_common.storage.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Two conversations with one beginning, a quarantined file, two requests."""
    return make_filled_home(tmp_path / "home")
