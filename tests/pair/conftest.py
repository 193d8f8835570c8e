"""Pairs that many tests share, for each takes seconds to start: one that caches, and one that never does."""

from collections.abc import Iterator

import pytest

from pair import FolderOf, Pair


@pytest.fixture(scope="session")
def warm_pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A llama; what one test asks, another may find cached: begin conversations with words of your own."""
    with Pair(tmp_path_factory.mktemp("warm"), tiny_folder("llama")) as pair:
        yield pair


@pytest.fixture(scope="session")
def cold_pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The same model with `--reuse off`: each answer is what an empty home gives."""
    with Pair(tmp_path_factory.mktemp("cold"), tiny_folder("llama"), "--reuse", "off") as pair:
        yield pair
