"""Cache of transformers' list of names: equal to transformers' own, made anew where it is not valid."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from warmline_backend.import_structure import ImportStructure, cache_import_structure

EQUAL = """
import sys
import warmline_backend
import transformers
from pathlib import Path
from transformers.utils import import_utils
models = Path(transformers.__file__).parent / "models"
assert import_utils.define_import_structure.__name__ == "define_cached"
own = import_utils.spread_import_structure(import_utils.create_import_structure_from_path(models))
assert import_utils.define_import_structure(models) == own
assert transformers.AutoTokenizer.__name__ == "AutoTokenizer"
"""


class Definition:
    """Stand-in for transformers' function that counts its calls."""

    def __init__(self) -> None:
        self.call_count = 0

    def __call__(self, module_path: Path, prefix: str | None = None) -> ImportStructure:
        self.call_count += 1
        return {frozenset({"torch"}): {f"{prefix}.llama": {"Llama"}}, frozenset(): {"auto": {"Auto"}}}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    set_version(monkeypatch, "5.0")
    (tmp_path / "__init__.py").touch()
    return tmp_path


def set_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = ModuleType("transformers")
    monkeypatch.setattr(module, "__version__", version, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", module)


def count_calls(package: Path, times: int, prefix: str | None = None) -> int:
    """Count how often the list is made anew when it is needed `times` times, always with the same result."""
    definition = Definition()
    define = cache_import_structure(definition)
    assert all(define(package, prefix) == Definition()(package, prefix) for _ in range(times))
    return definition.call_count


def test_backend_imports_transformers_with_equal_list() -> None:
    subprocess.run([sys.executable, "-c", EQUAL], check=True, capture_output=True)


def test_list_is_made_once(package: Path) -> None:
    assert count_calls(package, 3) == 1
    assert count_calls(package / "__init__.py", 3) == 0
    assert count_calls(package, 2, prefix="models") == 1


@pytest.mark.parametrize("content", [b"", b"\0", b"[", b"i\1\0\0\0", b"half"])
def test_damaged_file_is_made_anew(package: Path, content: bytes) -> None:
    count_calls(package, 1)
    (path,) = (package / "__pycache__").iterdir()
    path.write_bytes(path.read_bytes()[:40] if content == b"half" else content)
    assert count_calls(package, 2) == 1


def test_another_version_or_installation_makes_its_own(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_calls(package, 1)
    set_version(monkeypatch, "5.1")
    assert count_calls(package, 2) == 1
    (package / "__init__.py").unlink()
    (package / "__init__.py").touch()
    assert count_calls(package, 2) == 1


def test_version_in_development_has_no_cache(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, "5.1.0.dev0")
    assert count_calls(package, 2) == 2
    assert not (package / "__pycache__").exists()


def test_no_file_where_bytecode_is_not_written(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert count_calls(package, 2) == 2
    assert not (package / "__pycache__").exists()


def test_folder_that_cannot_be_written_is_no_error(package: Path) -> None:
    (package / "__pycache__").touch()
    assert count_calls(package, 2) == 2
