"""Limit of open descriptors, raised in a process of its own to keep the test run's."""

import os
import subprocess
import sys

import pytest

from warmline_common.process.file_limits import count_open_descriptors

PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from warmline_common.process.file_limits import raise_descriptor_limit
print(raise_descriptor_limit({wanted}), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "given"),
    [(64, 512, 256, 256), (64, 512, 4096, 512), (128, 512, 100, 128)],
    ids=["raised", "as far as allowed", "never lowered"],
)
def test_soft_limit_is_raised_within_hard_limit(soft: int, hard: int, wanted: int, given: int) -> None:
    program = PROGRAM.format(soft=soft, hard=hard, wanted=wanted)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == [given, given, hard]


def test_kernel_refusal_keeps_limit() -> None:
    """As on macOS, where the hard limit reads as none and a number beyond the kernel's is refused."""
    refuse = "resource.setrlimit = lambda *_: (_ for _ in ()).throw(ValueError('current limit exceeds maximum'))"
    program = PROGRAM.format(soft=64, hard=512, wanted=256).replace("print(", f"{refuse}\nprint(")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == [64, 64, 512]


def test_open_descriptors_are_counted() -> None:
    before = count_open_descriptors()
    pipe = os.pipe()
    assert count_open_descriptors() == before + 2
    for descriptor in pipe:
        os.close(descriptor)
    assert count_open_descriptors() == before
