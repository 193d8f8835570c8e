"""Fingerprint: what changes it and what does not; weights are read once."""

import ast
import hashlib
import json
import os
import shutil
import stat
from importlib import metadata
from io import FileIO
from pathlib import Path

import pytest

from warmline_backend.model import architectures, numerics
from warmline_backend.model import fingerprint as module
from warmline_backend.model.fingerprint import compute_fingerprint
from warmline_backend.model.kv_quantization import identify_quantization
from warmline_common.settings.quantization import make_quantization


@pytest.fixture
def model(tiny_folder: object, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "model"))  # type: ignore[operator]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def digested_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read to be digested."""
    names: list[str] = []
    digest = module.hashlib.file_digest

    def counted(file: FileIO, kind: str) -> object:
        names.append(Path(file.name).name)
        return digest(file, kind)

    monkeypatch.setattr(module.hashlib, "file_digest", counted)
    return names


def fingerprint_folder(model: Path, home: Path, **changes: object) -> str:
    settings = {"adapter_path": None, "quantization": None, "dtype": "float32"} | changes
    return compute_fingerprint(model, home_models_dir=home, **settings)  # type: ignore[arg-type]


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_fingerprint_is_stable_and_reads_weights_once(model: Path, home: Path, digested_files: list[str]) -> None:
    first = fingerprint_folder(model, home)
    assert len(first) == 64 and int(first, 16) > 0
    assert fingerprint_folder(model, home) == first
    assert digested_files == ["model.safetensors"]


def test_digest_cache_is_private_and_rebuilt_when_damaged(model: Path, home: Path, digested_files: list[str]) -> None:
    first = fingerprint_folder(model, home)
    path = home / "digests.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and list(home.iterdir()) == [path]
    for damage in ("{", "[]", '{"a": 5}', "[" * 100_000):
        path.write_text(damage)
        assert fingerprint_folder(model, home) == first
    for place in ("FIFO", "link"):
        path.unlink()
        os.mkfifo(path) if place == "FIFO" else path.symlink_to("/dev/zero")
        assert fingerprint_folder(model, home) == first
        assert path.is_file() and not path.is_symlink()
    assert len(digested_files) == 7


def test_changed_modification_time_rereads_weights(model: Path, home: Path, digested_files: list[str]) -> None:
    first = fingerprint_folder(model, home)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert fingerprint_folder(model, home) == first and len(digested_files) == 2


def test_changed_byte_changes_fingerprint(model: Path, home: Path) -> None:
    first, weights = fingerprint_folder(model, home), model / "model.safetensors"
    before = weights.stat()
    flip_bit(weights, -1)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps dates does
    assert fingerprint_folder(model, home) != first


def test_renamed_folder_keeps_fingerprint_without_reading(model: Path, home: Path, digested_files: list[str]) -> None:
    first = fingerprint_folder(model, home)
    assert fingerprint_folder(model.rename(model.with_name("other")), home) == first and len(digested_files) == 1


def test_copied_folder_keeps_fingerprint(model: Path, home: Path) -> None:
    assert fingerprint_folder(Path(shutil.copytree(model, model.with_name("copy"))), home) == fingerprint_folder(
        model, home
    )


def test_tokenizer_and_template_leave_fingerprint(model: Path, home: Path) -> None:
    first = fingerprint_folder(model, home)
    (model / "tokenizer_config.json").write_text("{}")
    flip_bit(model / "tokenizer.json", 5)
    assert fingerprint_folder(model, home) == first


def test_config_values_change_fingerprint_but_not_their_order(model: Path, home: Path) -> None:
    first = fingerprint_folder(model, home)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    assert fingerprint_folder(model, home) == first
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert fingerprint_folder(model, home) != first


def test_each_setting_changes_fingerprint(model: Path, home: Path) -> None:
    settings: list[dict[str, object]] = [
        {},
        {"quantization": make_quantization(8)},
        {"quantization": make_quantization(4)},
        {"quantization": make_quantization(8, 32)},
        {"quantization": make_quantization("8,4")},
        {"quantization": make_quantization("4,8")},
        {"quantization": make_quantization("8,4", "64,32")},
        {"quantization": make_quantization("8,4", 64, 1, 8)},
        {"quantization": make_quantization("8,4", 64, 2, 8)},
        {"quantization": make_quantization("8,4", 64, 2, 6)},
        {"quantization": make_quantization(4, 64, 2, 8)},
        {"dtype": "bfloat16"},
        {"shards": 2},
        {"grid": 2048},
        {"grid": 512},
    ]
    assert len({fingerprint_folder(model, home, **setting) for setting in settings}) == len(settings)


def test_one_format_for_all_rows_keeps_its_identity() -> None:
    """As it was before keys and values could be told apart: KV that was stored is still found."""
    assert identify_quantization(None) is None
    assert identify_quantization(make_quantization(0, 32, 2, 8)) is None
    assert identify_quantization(make_quantization(8)) == [8, 64]
    assert identify_quantization(make_quantization(4, 32)) == [4, 32]
    assert identify_quantization(make_quantization("8,8", "64,64", 2, 8)) == [8, 64]


def test_numerics_change_fingerprint_in_exact_mode_only(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, exact = fingerprint_folder(model, home), {fingerprint_folder(model, home, grid=2048)}
    real = json.dumps(numerics.describe_numerics())
    assert all(json.dumps([name, metadata.version(name)]) in real for name in ("mlx", "mlx-lm"))
    assert fingerprint_folder(model, home, grid=2048) in exact
    blas = {"user_api": "blas", "filepath": "/usr/lib/libopenblas.so", "internal_api": "openblas", "version": "0.3.21"}
    machines: list[list[dict[str, object]]] = [
        [blas],
        [blas | {"num_threads": 2}],
        [blas | {"num_threads": 4}],
        [blas | {"num_threads": 4, "architecture": "Zen"}],
        [blas | {"num_threads": 4, "version": "0.3.22"}],
    ]
    for libraries in machines:
        monkeypatch.setattr(numerics, "threadpool_info", lambda libraries=libraries: libraries)
        exact.add(fingerprint_folder(model, home, grid=2048))
    monkeypatch.setattr(numerics.mx, "device_info", lambda: {"device_name": "another", "free_memory": 1})
    exact.add(fingerprint_folder(model, home, grid=2048))
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    exact.add(fingerprint_folder(model, home, grid=2048))
    assert len(exact) == 8 and fingerprint_folder(model, home) == fast


def test_blas_of_numpy_leaves_fingerprint(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpys = {"user_api": "blas", "filepath": "/site-packages/numpy.libs/libscipy_openblas.so", "version": "1"}
    monkeypatch.setattr(numerics, "threadpool_info", list)
    without = fingerprint_folder(model, home, grid=2048)
    monkeypatch.setattr(numerics, "threadpool_info", lambda: [numpys, {"user_api": "openmp", "filepath": ""}])
    assert fingerprint_folder(model, home, grid=2048) == without


def test_code_of_architecture_and_its_dependencies_changes_fingerprint(
    tiny_folder: object, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen = tiny_folder("qwen3_5")  # type: ignore[operator]
    seen = {name for name, _ in module._hash_sources(qwen)}
    used = ["qwen3_5", "qwen3_next", "gated_delta", "rope_utils", "switch_layers", "base", "cache"]
    assert seen >= {f"mlx_lm.models.{name}" for name in used} and "mlx_lm.models.llama" not in seen
    first = fingerprint_folder(qwen, home)
    source = module.inspect.getsource
    monkeypatch.setattr(
        module.inspect, "getsource", lambda m: source(m) + ("#" if m.__name__.endswith("gated_delta") else "")
    )
    assert fingerprint_folder(qwen, home) != first


def test_own_architectures_are_part_of_fingerprint(tiny_folder: object) -> None:
    seen = {name for name, _ in module._hash_sources(tiny_folder("glm_moe_dsa"))}  # type: ignore[operator]
    used = ["mlx_lm.models.deepseek_v32", "mlx_lm.models.mla", "mlx_lm.models.cache", "mlx_lm.models.switch_layers"]
    ours = {name for name, _ in architectures.KV_REVISIONS.values()}
    assert seen >= {*ours, *used} and "mlx_lm.models.glm_moe_dsa" not in seen


def test_own_architectures_keep_the_identity_of_kv_stored_by_earlier_versions(tiny_folder: object) -> None:
    found = [pair for pair in module._hash_sources(tiny_folder("glm_moe_dsa")) if pair[0].startswith("warmline")]  # type: ignore[operator]
    assert found == [
        ["warmline_backend.models.glm_moe_dsa", "fdb2a4f72d9d78da30a81cf9b61dd1205e7ef5142fbadeb4a75c2c5e0e7a5a79"],
        [
            "warmline_backend.models.glm_moe_dsa_config",
            "5ea8557b27636080cab80b16fa7d14b53053a84dda432e58c280fb5794f3a574",
        ],
    ]


# By module: the first 16 digits of the revision's digest, and those of the code's.
REVISED_CODE = {
    "glm_moe_dsa": ("fdb2a4f72d9d78da", "37a58c4285fda549"),
    "glm_moe_dsa_config": ("5ea8557b27636080", "3c7b1ffd503f7b50"),
}


def hash_code(path: Path) -> str:
    """sha256 of a module's code: comments, docstrings, imports from this package and layout are left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("warmline_backend."):
            node.module = str(node.module).rpartition(".")[2]
    return hashlib.sha256(repr(list_fields(tree)).encode()).hexdigest()


def list_fields(node: object) -> object:
    """Nested lists of a tree's nodes without empty fields, which is the same on every Python: `unparse` is not."""
    if isinstance(node, ast.AST):
        fields = [[name, list_fields(value)] for name, value in ast.iter_fields(node) if value not in (None, [])]
        return [type(node).__name__, *fields]
    return [list_fields(each) for each in node] if isinstance(node, list) else node


def test_changed_code_of_an_own_architecture_needs_a_new_kv_revision() -> None:
    folder = Path(architectures.__file__).parent
    found = {
        path.stem: (architectures.KV_REVISIONS[path.stem][1][:16], hash_code(path)[:16])
        for path in sorted(folder.glob("*.py"))
        if path.stem != "__init__"
    }
    assert found == REVISED_CODE, (
        "the code of an architecture has changed: if the KV that it computes has changed too, renew its digest in "
        "KV_REVISIONS; then, or where KV is the same, bring REVISED_CODE up to date"
    )


def test_adapter_changes_fingerprint(model: Path, home: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapters.safetensors").write_bytes(b"a")
    first = fingerprint_folder(model, home, adapter_path=adapter)
    assert first != fingerprint_folder(model, home)
    (adapter / "adapters.safetensors").write_bytes(b"bb")
    assert fingerprint_folder(model, home, adapter_path=adapter) != first


def test_second_shard_changes_fingerprint(model: Path, home: Path, digested_files: list[str]) -> None:
    first = fingerprint_folder(model, home)
    shutil.copy(model / "model.safetensors", model / "model-2.safetensors")
    assert fingerprint_folder(model, home) != first
    assert sorted(digested_files) == ["model-2.safetensors", "model.safetensors"]


def test_folder_without_weights_raises_file_not_found(model: Path, home: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no model"):
        fingerprint_folder(model, home)


def test_digest_cache_is_bounded(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIGESTS_MAX", 2)
    for i in range(4):
        (model / f"model-{i}.safetensors").write_bytes(bytes(i))
    fingerprint_folder(model, home)
    assert len(json.loads((home / "digests.json").read_text())) == 2
