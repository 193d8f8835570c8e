"""A pair that many tests share, for starting one takes seconds."""

from collections.abc import Iterator

import pytest

from pair import FolderOf, Pair


@pytest.fixture(scope="session")
def warm_pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A llama; what one test asks, another may find cached: begin conversations with words of your own."""
    with Pair(tmp_path_factory.mktemp("warm"), tiny_folder("llama")) as pair:
        yield pair
