"""Fixtures of the dashboard tests: one browser for all, since a start takes a second."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser.chromium import Chromium

BUILD = Path(__file__).parents[2] / "build"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Chromium) -> Chromium:
    """Browser with a desktop's window size and no recorded events."""
    chromium.open("about:blank")
    chromium.set_viewport(1280, 900)
    chromium.list_events("")
    chromium.events.clear()
    return chromium


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """Folder for screenshots, which continuous integration keeps."""
    return Path(os.environ.get("TESTS_SCREENSHOTS", BUILD / "screenshots"))
