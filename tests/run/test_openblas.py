"""Finding OpenBLAS and preloading it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from warmline_run import openblas


@pytest.fixture(autouse=True)
def _forget_packages() -> Iterator[None]:
    openblas.has_cuda_build.cache_clear()
    yield
    openblas.has_cuda_build.cache_clear()


def make_library(root: Path, place: str) -> Path:
    path = root / place
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_threaded_build_is_preferred(tmp_path: Path) -> None:
    make_library(tmp_path, "usr/lib/aarch64-linux-gnu/libopenblas.so.0")
    threaded = make_library(tmp_path, "usr/lib/aarch64-linux-gnu/openblas-pthread/libopenblas.so.0")
    assert openblas.find_library(tmp_path) == threaded


def test_missing_openblas_prints_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "is_openblas_needed", lambda: True)
    monkeypatch.setattr(openblas, "find_library", lambda: None)
    preload, advice = openblas.choose_preload("")
    assert preload == ""
    assert "libopenblas0-pthread" in advice and "\n" not in advice


def test_preload_order_with_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "is_openblas_needed", lambda: True)
    monkeypatch.setattr(openblas, "find_library", lambda: Path("/x/libopenblas.so.0"))
    assert openblas.choose_preload("/y/libjemalloc.so") == ("/x/libopenblas.so.0:/y/libjemalloc.so", "")
    assert openblas.choose_preload("/y/libblas.so.3") == ("/y/libblas.so.3", "")


def test_openblas_not_needed_off_linux_or_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        name = "mlx-cuda-13"

    monkeypatch.setattr("sys.platform", "darwin")
    assert not openblas.is_openblas_needed()
    monkeypatch.setattr("sys.platform", "linux")
    assert openblas.is_openblas_needed()
    monkeypatch.setattr(openblas.metadata, "distributions", lambda: [Package])
    assert openblas.is_openblas_needed(), "packages are read once"
    openblas.has_cuda_build.cache_clear()
    assert not openblas.is_openblas_needed()
