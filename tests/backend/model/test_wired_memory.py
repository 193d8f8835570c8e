"""Memory that mlx keeps wired: as much as is set, and no more than macOS allows."""

import logging
import subprocess
import sys

import mlx.core as mx
import pytest

from warmline_backend.model.loader import ModelError
from warmline_backend.model.wired_memory import get_wirable_bytes, limit_wired_memory
from warmline_common.process.arguments import GB


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Limits that are set on a Mac whose GPU may use 48 GB."""
    set_limits: list[int] = []
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 48 * GB})
    monkeypatch.setattr(mx, "set_wired_limit", set_limits.append)
    return set_limits


def test_nothing_is_wired_by_default(limits: list[int]) -> None:
    limit_wired_memory(0)
    assert limits == []


def test_what_is_set_is_wired_up_to_what_the_gpu_may_use(limits: list[int]) -> None:
    limit_wired_memory(48 * GB)
    assert limits == [48 * GB]
    with pytest.raises(ModelError, match=r"wired_limit_gb 50 is more than the 48\.0 GB .* set less, or 0 for none"):
        limit_wired_memory(50 * GB)
    assert limits == [48 * GB]


@pytest.mark.skipif(get_wirable_bytes() > 0, reason="this machine has Metal")
def test_without_metal_it_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        limit_wired_memory(GB)
    assert "wired_limit_gb has no effect without Metal" in caplog.text
    assert mx.set_wired_limit(0) == 0


def test_no_import_of_the_server_wires_memory() -> None:
    """mlx-lm wires all that macOS recommends where its own generation is used."""
    code = "import warmline_backend.__main__, mlx.core as mx; print(mx.set_wired_limit(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
