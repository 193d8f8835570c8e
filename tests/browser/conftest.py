"""One browser for all tests of the dashboard: it takes a second to start."""

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
    """At a desktop's size, with nothing told yet."""
    chromium.open("about:blank")
    chromium.set_viewport(1280, 900)
    chromium.list_events("")
    chromium.events.clear()
    return chromium


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """A folder that continuous integration keeps."""
    return Path(os.environ.get("TESTS_SCREENSHOTS", BUILD / "screenshots"))
