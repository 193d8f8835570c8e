"""Cache of the list of names in transformers' modules.

At each import transformers reads 3,300 of its own files for the names that they define: half of the CPU time of a
backend's start.  The list depends on those files alone, so it is kept as Python keeps bytecode: in `__pycache__`, and
not where `sys.dont_write_bytecode` is set or the folder is read-only.  A list is valid for one version, one path and
one installation of transformers; versions in development, whose files may be edited, have none.
"""

import marshal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from warmline_common.storage import disk

MODULE = "transformers.utils.import_utils"
FUNCTION = "define_import_structure"

ImportStructure = dict[frozenset[str], dict[str, set[str]]]
DefineImportStructure = Callable[..., ImportStructure]


def install() -> None:
    """Let the next import of transformers use the cache; without effect once it is imported."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None or not isinstance(found.loader, SourceFileLoader):
            return found
        return spec_from_file_location(fullname, found.origin, loader=_Loader(fullname, found.origin))


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        with suppress(AttributeError):  # a version without the function starts as slowly as it does alone
            setattr(module, FUNCTION, cache_import_structure(getattr(module, FUNCTION)))


def cache_import_structure(define: DefineImportStructure) -> DefineImportStructure:
    """Wrap transformers' function: path of a package and prefix of its names → names by library needed and module."""

    def define_cached(module_path: str | Path, prefix: str | None = None) -> ImportStructure:
        version = str(getattr(sys.modules["transformers"], "__version__", "dev"))
        package = Path(module_path)
        package = package.parent if package.is_file() else package
        key = [version, str(package), prefix, (package / "__init__.py").stat().st_mtime_ns]
        path = Path(cache_from_source(str(package / f"import_structure-{prefix}.py"))).with_suffix(".bin")
        with suppress(OSError, ValueError, EOFError, TypeError):
            stored_key, structure = marshal.loads(path.read_bytes())
            if stored_key == key:
                return dict(structure)
        structure = define(module_path, prefix=prefix)
        if not sys.dont_write_bytecode and "dev" not in version:
            with suppress(OSError):
                disk.make_folder(path.parent)
                disk.replace_file(path, marshal.dumps([key, structure]))
        return structure

    return define_cached
