import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmline_backend import demo
from warmline_wire.home import Home


@pytest.fixture(scope="session")
def demo_home() -> Iterator[Home]:
    """A home with the demo model converted to float32; half a gigabyte, so removed at the end."""
    with tempfile.TemporaryDirectory(prefix="warmline-demo-") as folder:
        home = Home(Path(folder))
        demo.prepare(home, "float32")
        yield home
