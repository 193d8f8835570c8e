"""Fingerprint of everything that decides a model's KV.  Any thread.

No equality check backs it, so it is sha256.  Weights are read once: digests are cached by inode, size and times, since
reading 368 GB takes minutes.  Paths are left out, so that a moved model keeps its KV; so are tokenizer and template:
they decide token ids, and ids are compared.
"""

import hashlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import ModuleType

import mlx_lm.models.base
import mlx_lm.models.cache
from mlx_lm.utils import load_config

from warmline_backend.model.architectures import KV_REVISIONS
from warmline_backend.model.kv_quantization import identify_quantization
from warmline_backend.model.loader import find_model_classes
from warmline_backend.model.numerics import describe_numerics
from warmline_common.protocol.messages import SEGMENT_FORMAT
from warmline_common.settings.quantization import KvQuantization
from warmline_common.storage import disk

READERS_MAX = 8
DIGESTS_MAX = 4096  # remembered; the oldest are forgotten first
_OWN_PACKAGE = "warmline_backend.model.architectures."
_MODEL_PACKAGES = ("mlx_lm.models.", _OWN_PACKAGE)


def compute_fingerprint(
    model_path: Path,
    adapter_path: Path | None,
    quantization: KvQuantization | None,
    dtype: str,
    home_models_dir: Path,
    shards: int = 1,
    grid: int = 0,
    draft_path: Path | None = None,
) -> str:
    """Compute 64 hex digits.  Raises OSError for unreadable files, ValueError for an architecture that mlx-lm lacks.

    `dtype` is the KV's, `shards` the number of ranks that share the model.  With a `grid` (exact mode) everything that
    decides rounding is included, so that such KV and any other never meet.  With a draft model the KV is that of both.
    """
    cache = _DigestCache(home_models_dir / "digests.json")
    weights = _list_weights(model_path)
    adapter: list[Path] = []  # files that mlx-lm reads
    if adapter_path is not None:
        adapter = [adapter_path / "adapter_config.json", *sorted(adapter_path.glob("*.safetensors"))]
    digests = cache.compute_all([*weights, *adapter])
    identity: dict[str, object] = {
        "weights": [[path.name, digests[path]] for path in weights],
        "adapter": [[path.name, digests[path]] for path in adapter],
        "config": json.loads((model_path / "config.json").read_text()),
        "code": _hash_sources(model_path),
        "kv": identify_quantization(quantization),
        "dtype": dtype,
        "shards": shards,
        "segment_format": SEGMENT_FORMAT,
    }
    if draft_path is not None:
        drafting = _list_weights(draft_path)
        found = cache.compute_all(drafting)
        identity["draft"] = {
            "weights": [[path.name, found[path]] for path in drafting],
            "config": json.loads((draft_path / "config.json").read_text()),
            "code": _hash_sources(draft_path),
        }
    if grid:
        identity["exact"] = {"grid": grid, **describe_numerics()}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def has_digests(model_paths: Iterable[Path], home_models_dir: Path) -> bool:
    """True where the fingerprint of these models can be computed without reading their weights."""
    cache = _DigestCache(home_models_dir / "digests.json")
    return all(cache.has(path) for model_path in model_paths for path in _list_weights(model_path))


def _list_weights(model_path: Path) -> list[Path]:
    if weights := sorted(model_path.glob("model*.safetensors")):
        return weights
    raise FileNotFoundError(f"no model*.safetensors in {model_path}: its weights are missing, download it again")


def _hash_sources(model_path: Path) -> list[list[str]]:
    """Name and digest of each module that computes or holds this model's KV, sorted by name.

    mlx-lm's modules are identified by their source, our own by their declared revision: they may be moved and reworded.
    """
    config = load_config(model_path)
    modules = [mlx_lm.models.base, mlx_lm.models.cache]
    sources = {}
    if model_file := config.get("model_file"):
        sources["model_file"] = hashlib.sha256((model_path / model_file).read_bytes()).hexdigest()
    else:
        architecture = inspect.getmodule(find_model_classes(config)[0])
        assert architecture is not None
        modules.append(architecture)
    sources |= dict(_identify_module(module) for module in _find_dependencies(modules))
    return [[name, digest] for name, digest in sorted(sources.items())]


def _identify_module(module: ModuleType) -> tuple[str, str]:
    name = module.__name__
    if name.startswith(_OWN_PACKAGE):
        return KV_REVISIONS[name.removeprefix(_OWN_PACKAGE)]
    return name, hashlib.sha256(inspect.getsource(module).encode()).hexdigest()


def _find_dependencies(modules: Iterable[ModuleType]) -> list[ModuleType]:
    """List these modules of models (mlx-lm's and ours) and all that they import, directly or not.

    One architecture builds on others (qwen3_5 on qwen3_next), and on rope_utils, switch_layers and the like.
    """
    found: dict[str, ModuleType] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found:
            found[module.__name__] = module
            waiting.extend(_find_imports(module))
    return list(found.values())


def _find_imports(module: ModuleType) -> Iterator[ModuleType]:
    for value in vars(module).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.startswith(_MODEL_PACKAGES):
            yield sys.modules[name]


class _DigestCache:
    """sha256 of files, cached in a private JSON file; a damaged cache is started anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._digests = self._load()

    def has(self, path: Path) -> bool:
        """True where the digest of a file as it is now is kept."""
        with path.open("rb", buffering=0) as file:
            return _make_file_key(file) in self._digests

    def compute_all(self, paths: Sequence[Path]) -> dict[Path, str]:
        with ThreadPoolExecutor(max_workers=min(READERS_MAX, os.cpu_count() or 1)) as readers:
            return dict(zip(paths, readers.map(self._compute, paths), strict=True))

    def _compute(self, path: Path) -> str:
        with path.open("rb", buffering=0) as file:
            key = _make_file_key(file)
            if stored := self._digests.get(key):
                return stored
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if _make_file_key(file) != key:
                raise OSError(f"{path} changed while it was read")
        self._save(key, digest)
        return digest

    def _save(self, key: str, digest: str) -> None:
        """Save at once, so that a start that is interrupted need not read all of a large model again."""
        with self._lock:
            self._digests = {**self._load(), **self._digests, key: digest}  # other backends write there, too
            while len(self._digests) > DIGESTS_MAX:
                del self._digests[next(iter(self._digests))]
            with suppress(OSError):  # a digest that can't be remembered is computed again
                disk.replace_file(self._path, json.dumps(self._digests, indent=1))

    def _load(self) -> dict[str, str]:
        try:
            digests = json.loads(disk.read_file(self._path))
        except (OSError, ValueError, RecursionError):
            return {}
        valid = isinstance(digests, dict) and all(isinstance(v, str) and len(v) == 64 for v in digests.values())
        return digests if valid else {}


def _make_file_key(file: FileIO) -> str:
    """Key of a file's content.

    Without the device, whose number may change with a restart; with the change time, since the modification time can
    be set: another model may be copied over this one with its dates.
    """
    status = os.fstat(file.fileno())
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
