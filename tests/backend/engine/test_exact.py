"""Exact mode: exact_cases.py, run in a process with OpenBLAS in place of the reference BLAS.

A BLAS can only be chosen before a process starts.  Where there is no OpenBLAS to choose (on macOS, with CUDA), mlx's
results differ from shape to shape anyway, as the cases' own control checks.
"""

import os
import subprocess
import sys
from pathlib import Path

from warmline_run.openblas import choose_preload

CASES = Path(__file__).with_name("exact_cases.py")


def test_warm_equals_cold_bit_for_bit() -> None:
    libraries, advice = choose_preload(os.environ.get("LD_PRELOAD", ""))
    assert not advice, advice
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        str(CASES),
    ]
    run = subprocess.run(
        command, env=os.environ | {"LD_PRELOAD": libraries}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
