"""Oracle for models with recurrent layers: warm answers equal cold ones."""

from pathlib import Path

import pytest

from support.oracle.bounded import check


@pytest.mark.parametrize(("family", "modes"), [("qwen3_5", ("exact",)), ("falcon_h1", ("fast",))])
def test_warm_answers_equal_cold_ones(family: str, modes: tuple[str, ...], tmp_path: Path) -> None:
    check(family, modes, tmp_path)
