"""Windows, quantized rows, and all kinds in one model: warm is cold, whatever happened before."""

from pathlib import Path

import pytest

from support.oracle.bounded import check


@pytest.mark.parametrize(("family", "modes"), [("gemma3", ("exact",)), ("quantized", ("fast",))])
def test_no_answer_differs(family: str, modes: tuple[str, ...], tmp_path: Path) -> None:
    check(family, modes, tmp_path)
