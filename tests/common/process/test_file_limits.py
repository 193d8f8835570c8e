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
    refuse = "lambda *_: (_ for _ in ()).throw(ValueError('current limit exceeds maximum'))"
    program = PROGRAM.format(soft=64, hard=512, wanted=256).replace("from", f"resource.setrlimit = {refuse}\nfrom", 1)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == [64, 64, 512]


@pytest.mark.parametrize(
    ("limits", "asked", "given"),
    [
        ((64, 512), (2048, 4096), (512, 512)),
        ((64, 8192), (2048, 4096), (2048, 8192)),
        ((4096, 8192), (2048, 4096), (4096, 8192)),
    ],
    ids=["beyond the hard one", "hard one is not lowered", "soft one is not lowered"],
)
def test_libraries_only_raise_protected_limit(
    limits: tuple[int, int], asked: tuple[int, int], given: tuple[int, int]
) -> None:
    program = "import resource\n"
    program += f"resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
    program += "from warmline_common.process.file_limits import protect_descriptor_limit\n"
    program += "protect_descriptor_limit()\n"
    program += f"resource.setrlimit(resource.RLIMIT_NOFILE, {asked})\n"
    program += "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    program += "print(*resource.getrlimit(resource.RLIMIT_NOFILE), *resource.getrlimit(resource.RLIMIT_CORE))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert tuple(map(int, done.stdout.split())) == (*given, 0, 0)


def test_backend_package_protects_limit() -> None:
    program = "import resource, warmline_backend\n"
    program += "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
    program += "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))\n"
    program += "print(before == resource.getrlimit(resource.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_too_few_descriptors_are_refused_with_number() -> None:
    program = PROGRAM.format(soft=64, hard=100, wanted=8192).replace("raise_descriptor_limit", "reserve_descriptors")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "only 100 files and connections" in done.stderr and "128 are needed" in done.stderr


def test_open_descriptors_are_counted() -> None:
    before = count_open_descriptors()
    pipe = os.pipe()
    assert count_open_descriptors() == before + 2
    for descriptor in pipe:
        os.close(descriptor)
    assert count_open_descriptors() == before
