"""Fixtures of the pair tests: shared pairs (starting one takes seconds), and a library that is slow to import."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pair.pair import FolderOf, Pair


@pytest.fixture(scope="session")
def warm_pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Pair with a llama; begin conversations with unique words, since other tests' prompts may be cached."""
    with Pair(tmp_path_factory.mktemp("warm"), tiny_folder("llama")) as pair:
        yield pair


@pytest.fixture(scope="session")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the trained model that calls tools (tests/support/agent_model); read-only by convention."""
    from support.agent_model.agent_folder import build  # here, so that tests without a model don't import mlx

    return build(tmp_path_factory.mktemp("models") / "agent")


@pytest.fixture(scope="session")
def agent_pair(agent_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Pair with the trained model; begin conversations with unique words, as with `warm_pair`."""
    with Pair(tmp_path_factory.mktemp("agents"), agent_folder, "--prefill-step-size", "512") as pair:
        pair.warm_up_restores()
        yield pair


@pytest.fixture(scope="session")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # at import it would fetch prices
    import litellm as module

    module.telemetry = False
    return module
