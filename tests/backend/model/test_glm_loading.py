"""Strict loading of GLM: no parameter is left random, none is dropped silently."""

import ast
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_model

import warmline_backend.model.model
from support import tiny_models
from support.glm.golden_glm import (
    TOLERANCE,
    assert_equals_reference,
    compute_in_chunks,
    load_weights,
    make_arguments,
    make_weights,
    read_golden,
    write_folder,
)
from support.glm.recipe import CASES, make_tokens
from warmline_backend.model.architectures.glm_moe_dsa import Model
from warmline_backend.model.loader import (
    ModelError,
    ParameterMismatchError,
    find_model_classes,
    format_by_kind,
    load_lazy_model,
)
from warmline_backend.model.model import load_served_model
from warmline_common.settings.quantization import make_quantization

CASE = "shared_as_listed"  # full shared shared full shared
CONFIG = CASES[CASE]
INDEXER = ("k_norm.bias", "k_norm.weight", "weights_proj.weight", "wk.weight", "wq_b.weight")


def rewrite_config(folder: Path, **changes: Any) -> Path:
    """Change entries of config.json; None removes an entry."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def catch_mismatch(folder: Path) -> ParameterMismatchError:
    with pytest.raises(ParameterMismatchError) as raised:
        load_lazy_model(folder, trust_remote_code=False)
    return raised.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(CONFIG, tmp_path / "glm")


def test_every_parameter_equals_checkpoint(folder: Path) -> None:
    """The model of the folder is that of the golden test, bit for bit."""
    model, config = load_lazy_model(folder, trust_remote_code=False)
    assert config["model_type"] == "glm_moe_dsa"
    held = dict(tree_flatten(load_weights(Model(make_arguments(CONFIG)), make_weights(CONFIG)).parameters()))
    found = dict(tree_flatten(model.parameters()))
    assert found.keys() == held.keys()
    for name, array in found.items():
        assert mx.array_equal(array, held[name]), name
    assert_equals_reference(CASE, compute_in_chunks(model, make_tokens(CASE), 20))


def test_indexers_are_never_random(folder: Path) -> None:
    """A loader that takes every layer for full would make up indexers of the shared ones, which select garbage."""
    error = catch_mismatch(rewrite_config(folder, indexer_types=None))
    shared = [1, 2, 4]
    assert set(error.missing) == {f"model.layers.{n}.self_attn.indexer.{name}" for n in shared for name in INDEXER}
    assert not error.unexpected and not error.wrong_shape
    assert "15 missing (that the model needs and the files lack):" in str(error)
    for name in INDEXER:
        assert f"\n  model.layers.*.self_attn.indexer.{name}: 3 layers (1-2, 4)" in str(error)


def test_indexer_of_shared_layer_is_unexpected(folder: Path) -> None:
    error = catch_mismatch(rewrite_config(folder, indexer_types=["full", "shared", "shared", "shared", "shared"]))
    assert set(error.unexpected) == {f"model.layers.3.self_attn.indexer.{name}" for name in INDEXER}
    assert not error.missing and "model.layers.*.self_attn.indexer.wk.weight: 1 layer (3)" in str(error)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["full"] * 4, "indexer_types in config.json has 4 entries for 5 layers"),
        (["shared"] + ["full"] * 4, 'layer 0 is "shared", but there is no layer before it to share with'),
        (["full", "sahred", "shared", "full", "shared"], "indexer_types in config.json says sahred; expected full or"),
    ],
)
def test_invalid_indexer_types_are_refused(folder: Path, types: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_lazy_model(rewrite_config(folder, indexer_types=types), trust_remote_code=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 0}, "index_topk in config.json is 0; expected 1 or more"),
        ({"index_topk": 1.5}, "index_topk in config.json is 1.5; expected a whole number"),
        ({"n_routed_experts": "many"}, 'n_routed_experts in config.json is "many"; expected a whole number'),
        ({"indexer_types": "full"}, 'indexer_types in config.json is "full"; expected a list or null'),
        ({"rope_parameters": [1]}, "rope_parameters in config.json is .1.; expected an object or null"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta .of rope_parameters. in config.json is 0; expected"),
        ({"rope_parameters": None}, "rope_theta .of rope_parameters. in config.json is null; expected a number above"),
        ({"norm_topk_prob": 1}, "norm_topk_prob in config.json is 1; expected true or false"),
        ({"hidden_act": "gelu"}, 'hidden_act in config.json is "gelu"; expected silu'),
        ({"tie_word_embeddings": True}, "tie_word_embeddings in config.json is true; expected false"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok in config.json is 9; expected at most 8"),
        ({"n_group": 4, "topk_group": 1}, "num_experts_per_tok in config.json is 3; expected at most 2"),
        ({"n_group": 3, "topk_group": 2}, "n_group in config.json is 3; expected a number of groups"),
    ],
)
def test_invalid_config_values_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    """Some of them would be computed with, and answer."""
    with pytest.raises(ValueError, match=message):
        load_lazy_model(rewrite_config(folder, **changes), trust_remote_code=False)


def test_rope_settings_of_older_configs_are_read() -> None:
    theta = CONFIG["rope_parameters"]["rope_theta"]
    plain = {**CONFIG, "rope_parameters": None, "rope_theta": theta}
    assert make_arguments(plain).rope_parameters == make_arguments(CONFIG).rope_parameters
    yarn = CASES["yarn"]["rope_parameters"]
    scaled = {"type" if key == "rope_type" else key: value for key, value in yarn.items()}
    older = {**CASES["yarn"], "rope_parameters": None, "rope_scaling": scaled}
    prompt = mx.array([make_tokens("yarn")])
    logits, expected = (
        load_weights(Model(make_arguments(each)), make_weights(each))(prompt) for each in (older, CASES["yarn"])
    )
    assert mx.array_equal(logits, expected)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_b_proj.weight"])
def test_eight_bit_floats_are_refused(folder: Path, name: str) -> None:
    """mlx reads them as integers: without scales the model would compute with their bits."""
    held = mx.load(str(folder / "model.safetensors"))
    held[name] = held[name].astype(mx.uint8)
    mx.save_safetensors(str(folder / "model.safetensors"), held)
    error = catch_mismatch(folder)
    assert error.wrong_type == ((name, "float32", "uint8"),) and "1 of another type" in str(error)


def test_wrong_shape_reports_needed_and_found(folder: Path) -> None:
    error = catch_mismatch(rewrite_config(folder, index_head_dim=64))
    kind = "model.layers.*.self_attn.indexer.wk.weight"
    assert f"{kind}: 2 layers (0, 3)" in str(error) and f"{kind}: needed (64, 64), found (32, 64)" in str(error)


def test_only_layer_ignored_by_reference_is_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = mx.load(str(folder / "model.safetensors"))
    held |= {f"model.layers.5.{name}": mx.zeros((2, 2)) for name in ("eh_proj.weight", "enorm.weight")}
    mx.save_safetensors(str(folder / "model.safetensors"), held)
    with caplog.at_level(logging.INFO):
        load_lazy_model(folder, trust_remote_code=False)
    assert "2 parameters of model.layers.5.* left out, as in the reference" in caplog.text
    held["model.layers.6.enorm.weight"] = mx.zeros((2, 2))
    held["model.rotary.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(folder / "model.safetensors"), held)
    assert catch_mismatch(folder).unexpected == ("model.layers.6.enorm.weight", "model.rotary.weight")


def test_parameters_of_mlx_lm_architectures_are_checked(tmp_path: Path) -> None:
    folder = tiny_models.build("llama", tmp_path / "llama")
    held = mx.load(str(folder / "model.safetensors"))
    del held["model.layers.1.mlp.up_proj.weight"]
    held["model.layers.0.mlp.side_proj.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(folder / "model.safetensors"), held)
    error = catch_mismatch(folder)
    assert error.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert error.unexpected == ("model.layers.0.mlp.side_proj.weight",)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: rewrite_config(folder, hidden_size=None),
        lambda folder: rewrite_config(folder, hidden_size="64"),
        lambda folder: rewrite_config(folder, rope_scaling={"rope_type": "yarn"}),
        lambda folder: rewrite_config(folder, text_config="x"),
        lambda folder: (folder / "model.safetensors").write_bytes(bytes(8)),
        lambda folder: (folder / "generation_config.json").write_text("[]"),
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        lambda folder: rewrite_config(folder, model_type=["llama"]),
        lambda folder: rewrite_config(folder, num_hidden_layers=10**9),
    ],
)
def test_any_loading_failure_raises_model_error(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    """Not a failure of the process, which would be restarted again and again."""
    folder = tiny_models.build("llama", tmp_path / "llama")
    spoil(folder)
    with pytest.raises(ModelError, match=r"again|model_type"):
        load_lazy_model(folder, trust_remote_code=False)


@pytest.mark.parametrize("name", ["llama[4bit]", "llam*", "llama?"])
def test_path_with_glob_characters_is_refused(tmp_path: Path, name: str) -> None:
    """mlx-lm would find the weights of other folders by it."""
    tiny_models.build("llama", tmp_path / "llama1", seed=1)
    folder = tiny_models.build("llama", tmp_path / name)
    with pytest.raises(ModelError, match="in its path"):
        load_lazy_model(folder, trust_remote_code=False)
    link = tmp_path / "link"
    link.symlink_to(folder)
    load_lazy_model(link, trust_remote_code=False)


def test_model_code_cannot_exit_process(tmp_path: Path) -> None:
    folder = rewrite_config(tiny_models.build("llama", tmp_path / "llama"), model_file="own.py")
    (folder / "own.py").write_text("raise SystemExit(0)")
    with pytest.raises(ModelError, match="SystemExit: 0"):
        load_lazy_model(folder, trust_remote_code=True)


@pytest.mark.parametrize("path", ["a" * 5000, "~no_such_user_here/x"])
def test_invalid_folder_name_raises_model_error(path: str) -> None:
    with pytest.raises(ModelError, match="no folder can be called so"):
        load_served_model(path, "m")


def test_invalid_tokenizer_and_adapter_raise_model_error(tmp_path: Path) -> None:
    folder = tiny_models.build("llama", tmp_path / "llama")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapters.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="not an adapter for this model"):
        load_served_model(str(folder), "m", adapter_path=str(adapter))
    with pytest.raises(ModelError, match="choose a --kv-group-size that divides"):
        load_served_model(str(folder), "m", quantization=make_quantization(8, 128))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"download the tokenizer's files again.*KeyError"):
        load_served_model(str(folder), "m")


@pytest.mark.parametrize("kind", ["base", "cache", "switch_layers"])
def test_mlx_lm_module_without_architecture_is_unknown(kind: str) -> None:
    with pytest.raises(ValueError, match=f"Model type {kind} not supported"):
        find_model_classes({"model_type": kind})


def test_format_by_kind_lists_layers() -> None:
    names = [f"model.layers.{n}.a.weight" for n in (3, 1, 2, 7)] + ["lm_head.weight"]
    assert format_by_kind(names) == ["lm_head.weight", "model.layers.*.a.weight: 4 layers (1-3, 7)"]
    many = format_by_kind(f"model.layers.{n}.a" for n in range(0, 60, 2))
    assert many == ["model.layers.*.a: 30 layers (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ...)"]


def test_backend_has_no_unchecked_load() -> None:
    sources = Path(load_lazy_model.__code__.co_filename).parent.rglob("*.py")
    calls = [node for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    loads = [call for call in calls if "load" in ast.unparse(call.func)]
    assert loads
    for call in loads:
        assert not any(word.arg == "strict" and ast.unparse(word.value) == "False" for word in call.keywords)


def test_failing_model_code_is_named(folder: Path) -> None:
    (rewrite_config(folder, model_file="mine.py") / "mine.py").write_text("import no_such_package")
    with pytest.raises(ModelError, match=r"mine\.py, code that comes with the model, fails; .*no_such_package"):
        load_lazy_model(folder, trust_remote_code=True)


def test_unreachable_repository_names_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("nobody\nanswers")

    monkeypatch.setattr(warmline_backend.model.model, "_download", unreachable)
    with pytest.raises(ModelError, match=r"neither a folder here nor in the hub's cache, .*nobody answers.*hf down"):
        load_served_model("owner/none", "none")


# ---- quantized


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("affine", 4, 32), ("affine", 8, 32), ("mxfp4", 4, 32)])
def test_quantized_weights_equal_dequantized_logits(mode: str, bits: int, group_size: int, tmp_path: Path) -> None:
    """Weights as a converter writes them give the logits of the same numbers as floats."""
    model = load_weights(Model(make_arguments(CONFIG)), make_weights(CONFIG))
    quantized, config = quantize_model(model, dict(CONFIG), group_size, bits, mode)
    save_model(tmp_path, quantized)
    (tmp_path / "config.json").write_text(json.dumps(config))
    served, _ = load_lazy_model(tmp_path, trust_remote_code=False)
    names = dict(tree_flatten(served.parameters()))
    assert {f"model.layers.0.self_attn.{part}.scales" for part in ("embed_q", "unembed_out", "o_proj")} <= names.keys()
    assert "model.layers.1.mlp.switch_mlp.up_proj.scales" in names
    floats = Model(make_arguments(CONFIG))
    floats.load_weights(list(dequantize(names, mode, bits, group_size).items()))
    prompt = make_tokens(CASE)
    difference = (
        mx.abs(compute_in_chunks(served, prompt, 20, 3) - compute_in_chunks(floats, prompt, 20, 3)).max().item()
    )
    assert difference < TOLERANCE
    apart = np.abs(np.array(compute_in_chunks(served, prompt, 20)) - read_golden(CASE, "logits")).max()
    assert apart > 1e-3, "nothing was quantized"


def dequantize(names: dict[str, mx.array], mode: str, bits: int, group_size: int) -> dict[str, mx.array]:
    floats = {}
    for name, array in names.items():
        prefix, _, field = name.rpartition(".")
        if field in ("scales", "biases"):
            continue
        if field == "weight" and f"{prefix}.scales" in names:
            scales, biases = names[f"{prefix}.scales"], names.get(f"{prefix}.biases")
            array = mx.dequantize(array, scales, biases, group_size=group_size, bits=bits, mode=mode)
            array = array.astype(mx.float32)
        floats[name] = array
    return floats


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_quantized_kv_projection_is_dequantized_before_split(mode: str, bits: int, group_size: int) -> None:
    """Keys and values of a head share one matrix in checkpoints; these modes have no biases."""
    held = make_weights(CONFIG)
    rounded = dict(held)
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.kv_b_proj"
        packed, scales = mx.quantize(held[f"{name}.weight"], group_size=group_size, bits=bits, mode=mode)
        held |= {f"{name}.weight": packed, f"{name}.scales": scales}
        rounded[f"{name}.weight"] = mx.dequantize(packed, scales, group_size=group_size, bits=bits, mode=mode)
    prompt = mx.array([make_tokens(CASE)])
    ours, expected = (load_weights(Model(make_arguments(CONFIG)), given)(prompt) for given in (held, rounded))
    assert mx.array_equal(ours, expected)
