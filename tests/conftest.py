"""Shared fixtures.  That this file lies here also puts tests/ on the import path, for `tiny_models`."""

import contextlib
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from warmline_common.storage.home import Home

FolderOf = Callable[..., Path]

# Models are tiny and processes many: idle threads of a BLAS that spin take the cores from those that compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# mlx wakes a thread for each operation, and the tests have more threads that compute than there are cores.  Under this
# policy of Linux a woken thread doesn't interrupt the one that wakes it, which takes a third off the tests' time.  The
# processes that tests start inherit it.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):  # not permitted in some containers
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# How long anything takes says nothing on a machine that is busy.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection() -> None:
    """Look for no garbage while modules are imported and tests collected: nearly all of that lives to the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what was collected out of each later collection of garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """`tiny_folder(family, **options)`: the folder of a tiny model, made once a session; read-only by convention."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str, **options: object) -> Path:
        from support.tiny_models import build  # here, so that tests without a model don't import mlx

        name = "-".join([family, *(f"{key}={value}" for key, value in sorted(options.items()))])
        return build(family, root / name, **options)

    return folder


@pytest.fixture(scope="session")
def demo_home() -> Iterator[Home]:
    """Home with the demo model converted to float32; half a gigabyte, so removed at the end."""
    from warmline_backend import demo

    with tempfile.TemporaryDirectory(prefix="warmline-demo-") as folder:
        home = Home(Path(folder))
        demo.prepare_demo_model(home, "float32")
        yield home
