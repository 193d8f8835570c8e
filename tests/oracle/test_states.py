"""Models with recurrent layers: warm is cold, whatever happened before."""

from pathlib import Path

import pytest

from support.oracle.bounded import check


@pytest.mark.parametrize(("family", "modes"), [("qwen3_5", ("exact",)), ("falcon_h1", ("fast",))])
def test_no_answer_differs(family: str, modes: tuple[str, ...], tmp_path: Path) -> None:
    check(family, modes, tmp_path)
