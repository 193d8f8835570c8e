"""Pins of a keeper that has started nothing yet, as while backends of an earlier one end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from warmline_common.settings.resolve import resolve
from warmline_common.storage.home import Home
from warmline_run.keeper.errors import PinNotWrittenError
from warmline_run.keeper.keeper import Keeper, KeeperSurroundings


def make_keeper(root: Path) -> Keeper:
    home = Home(root)
    home.prepare()
    client: Any = None  # nothing is called
    models = json.dumps([{"name": "a", "path": "org/a", "pinned": True}, {"name": "b", "path": "org/b"}])
    config = resolve({"home": str(root), "models": models}, {})
    return Keeper(config, KeeperSurroundings(home, {}, 0, client, asyncio.Event()))


def list_pinned(keeper: Keeper) -> list[str]:
    return [model.name for model in keeper.describe().models if model.pinned]


def test_pin_is_written_before_it_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "run" / "models.json"
    Home(tmp_path).prepare()
    file.write_text('{"pins": {}, "loaded": ["b"]}')
    keeper = make_keeper(tmp_path)
    keeper.pin("b", True)
    keeper.pin("a", False)
    assert list_pinned(make_keeper(tmp_path)) == ["b"]
    assert json.loads(file.read_text())["loaded"] == ["b"], "which this keeper is yet to load"


@pytest.mark.parametrize(("name", "is_pinned", "verb"), [("b", True, "pinned"), ("a", False, "unpinned")])
def test_pin_that_cannot_be_written_is_refused(tmp_path: Path, name: str, is_pinned: bool, verb: str) -> None:
    keeper = make_keeper(tmp_path)
    file = tmp_path / "run" / "models.json"
    (file / "in the way").mkdir(parents=True)
    with pytest.raises(PinNotWrittenError, match=f"^{name} is not {verb}: that can't be written to .*models.json"):
        keeper.pin(name, is_pinned)
    assert list_pinned(keeper) == ["a"]
    (file / "in the way").rmdir()
    file.rmdir()
    keeper.pin(name, is_pinned)
    assert list_pinned(make_keeper(tmp_path)) == (["a", "b"] if is_pinned else [])
