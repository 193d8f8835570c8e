"""Fixture of the cachectl tests: a home with conversations, a quarantined file and requests."""

from pathlib import Path

import pytest

from support.cachectl.homes import make_filled_home
from warmline_common.storage.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Home with two conversations that share a prefix, a quarantined file, and two requests."""
    return make_filled_home(tmp_path / "home")
