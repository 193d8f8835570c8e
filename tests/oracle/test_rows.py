"""Oracle for models with KV rows alone: warm answers equal cold ones.

Exact mode has tests of its own for all families (backend/engine/exact_cases.py), and the oracle for two of others.
"""

from pathlib import Path

import pytest

from support.oracle.bounded import check


@pytest.mark.parametrize(("family", "modes"), [("llama", ("fast",)), ("glm_moe_dsa", ("fast",))])
def test_warm_answers_equal_cold_ones(family: str, modes: tuple[str, ...], tmp_path: Path) -> None:
    check(family, modes, tmp_path)
