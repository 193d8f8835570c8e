"""`warmline doctor` on whole model folders: good ones, and each with one fault."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from support import tiny_models
from support.backend.small_tokenizers import CHATML, make_byte_level_tokenizer
from support.device_memory import read_active_memory
from warmline_backend.doctor import __main__ as command
from warmline_backend.doctor import files, report
from warmline_backend.doctor.chat_template import check_template
from warmline_backend.doctor.examine import Examination, examine_model
from warmline_backend.doctor.files import LENGTH_BYTES, read_shard
from warmline_backend.doctor.findings import FindingLevel, Findings
from warmline_backend.doctor.settings import DoctorSettings

HUGE_BYTES = 100 * 10**9
WEIGHTS = "model.safetensors"

Copied = Callable[..., Path]


@pytest.fixture
def copy_model(tiny_folder: Callable[..., Path], tmp_path: Path) -> Copied:
    """`copy_model(family)`: a writable copy of a tiny model's folder with everything that an agent needs."""

    def copy(family: str = "llama", **options: Any) -> Path:
        return shutil.copytree(tiny_folder(family, **{"tools": True, **options}), tmp_path / "model")

    return copy


def examine_folder(folder: Path, **options: Any) -> Examination:
    return examine_model(DoctorSettings(str(folder), **options))


def list_messages(examination: Examination, level: FindingLevel) -> str:
    return "\n".join(f"{each.area}: {each.what} -> {each.todo}" for each in examination.findings if each.level is level)


def change_json(folder: Path, name: str, **changes: Any) -> None:
    """Set keys of a JSON file, or remove those that are None."""
    content = {**json.loads((folder / name).read_text()), **changes}
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def change_weights(folder: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    weights: Any = mx.load(str(folder / WEIGHTS))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})


@pytest.mark.parametrize("family", ["llama", "gemma3", "baichuan_m1", "glm_moe_dsa"])
def test_good_folder_is_ok(tiny_folder: Callable[..., Path], family: str) -> None:
    examination = examine_folder(tiny_folder(family, tools=True))
    assert [finding for finding in examination.findings if finding.level is not FindingLevel.OK] == []
    assert examination.verdict is FindingLevel.OK
    assert {finding.area for finding in examination.findings} >= {"files", "config", "parameters", "cache", "memory"}
    assert examination.serve_command.startswith("warmline serve --model ")


def test_serve_command_is_not_wrapped(tiny_folder: Callable[..., Path]) -> None:
    arguments = json.dumps({"enable_thinking": False, "reasoning_effort": None, "words": "of any number " * 9})
    examination = examine_folder(tiny_folder("llama", tools=True), chat_template_args=arguments)
    console = Console(file=io.StringIO(), width=40)
    report.print_report(examination, console)
    assert isinstance(console.file, io.StringIO)
    assert f"\n  {examination.serve_command}\n" in console.file.getvalue() and arguments in examination.serve_command


def test_recurrent_model_with_added_token(tiny_folder: Callable[..., Path]) -> None:
    """transformers gives it <|endoftext|>, for which the tiny model has no row; all else is well."""
    examination = examine_folder(tiny_folder("qwen3_5", tools=True))
    (wrong,) = [finding for finding in examination.findings if finding.level is not FindingLevel.OK]
    assert wrong.area == "tokenizer" and "<|endoftext|>" in wrong.what
    assert "3 x ArraysCache, 1 x KVCache" in list_messages(examination, FindingLevel.OK)
    assert "resumes at its checkpoints" in list_messages(examination, FindingLevel.OK)


def test_layers_and_caches_are_listed(tiny_folder: Callable[..., Path]) -> None:
    examination = examine_folder(tiny_folder("glm_moe_dsa", tools=True))
    assert "2 x CacheList(KVCache, KVCache), 2 x CacheList(KVCache)" in list_messages(examination, FindingLevel.OK)
    assert "2 layers select tokens, 2 share a selection" in list_messages(examination, FindingLevel.OK)


def test_missing_folder_and_file_are_refused(tmp_path: Path) -> None:
    for model in (str(tmp_path / "none"), "none", str(Path(__file__))):
        examination = examine_model(DoctorSettings(model))
        assert examination.verdict is FindingLevel.FAIL and examination.serve_command == ""
    assert "there is no such folder" in list_messages(examine_folder(tmp_path / "none"), FindingLevel.FAIL)
    assert "no config.json" in list_messages(examine_folder(tmp_path), FindingLevel.FAIL)


def test_repository_is_found_in_hub_cache(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "HF_HUB_CACHE", str(tmp_path))
    assert "hf download owner/tiny" in list_messages(examine_model(DoctorSettings("owner/tiny")), FindingLevel.FAIL)
    repository = tmp_path / "models--owner--tiny"
    shutil.copytree(tiny_folder("llama", tools=True), repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert examine_model(DoctorSettings("owner/tiny")).serve_command == "warmline serve --model owner/tiny"
    (repository / "blobs").mkdir()
    (repository / "blobs" / "0123.incomplete").touch()
    assert "interrupted download" in list_messages(examine_model(DoctorSettings("owner/tiny")), FindingLevel.WARN)


def test_broken_files_never_reach_mlx(copy_model: Copied) -> None:
    folder = copy_model()
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    examination = examine_folder(folder)
    assert "truncated" in list_messages(examination, FindingLevel.FAIL)
    assert {finding.area for finding in examination.findings if finding.level is FindingLevel.FAIL} == {"files"}
    assert "parameters" not in {finding.area for finding in examination.findings}
    assert "template" in {finding.area for finding in examination.findings}  # what can still be seen, is


def test_truncated_file_hides_no_indexer_finding(copy_model: Copied) -> None:
    """Else the advice would be to look for another model, where a download is to be finished."""
    folder = copy_model("glm_moe_dsa")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])
    examination = examine_folder(folder)
    assert {finding.area for finding in examination.findings if finding.level is FindingLevel.FAIL} == {"files"}


def test_missing_unexpected_and_misshapen_parameters(copy_model: Copied) -> None:
    folder = copy_model()

    def spoil(weights: dict[str, mx.array]) -> None:
        for layer in (0, 1):
            del weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
        weights["model.layers.1.self_attn.extra.weight"] = mx.zeros((2, 2))
        weights["model.norm.weight"] = mx.zeros((3,))

    change_weights(folder, spoil)
    messages = list_messages(examine_folder(folder), FindingLevel.FAIL)
    assert "2 parameters that the model needs are not in the weights" in messages
    assert "model.layers.*.self_attn.q_proj.weight: 2 layers (0-1)" in messages
    assert "1 parameters of the weights are not in the model" in messages
    assert "model.norm.weight [3], not [64]" in messages


@pytest.mark.parametrize(
    ("types", "what"),
    [
        (["full", "shared"], "2 entries for 4 layers"),
        (["full", "shared", "half", "shared"], "says half"),
        (["shared", "full", "full", "shared"], "layer 0"),
        (
            ["full", "full", "full", "shared"],
            '1 layers are "full" in indexer_types and have no indexer in the weights: 1',
        ),
        (["full", "shared", "shared", "shared"], '1 layers are "shared" in indexer_types and have an indexer'),
        (None, '2 layers are "full" in indexer_types and have no indexer in the weights: 1, 3'),
    ],
)
def test_contradictory_indexer_types_are_found(copy_model: Copied, types: list[str] | None, what: str) -> None:
    folder = copy_model("glm_moe_dsa")
    change_json(folder, "config.json", indexer_types=types)
    assert what in list_messages(examine_folder(folder), FindingLevel.FAIL)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "no_such_model"}, "unknown architecture no_such_model"),
        ({"model_type": None}, "names no model_type"),
        ({"hidden_size": None}, "not complete for llama"),
        ({"vocab_size": 300}, "have another shape"),
        ({"vocab_size": 260}, "3 of the tokenizer's 263 tokens have no row in the embedding"),
        ({"model_type": "base"}, "unknown architecture base"),
        ({"model_type": "\x07"}, r"unknown architecture \x07"),
        ({"text_config": "x"}, "text_config in"),
        ({"hidden_size": "x"}, "llama"),
        ({"rope_scaling": [1]}, "'list' object"),
        ({"eos_token_id": 999}, "answers are to end at 999"),
        ({"quantization": {"bits": 4}}, "quantization in config.json lacks group_size"),
    ],
)
def test_wrong_config_is_found(copy_model: Copied, changes: dict[str, Any], what: str) -> None:
    folder = copy_model()
    change_json(folder, "config.json", **changes)
    assert what in list_messages(examine_folder(folder), FindingLevel.FAIL)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda folder: (folder / "generation_config.json").write_text("[]"), "generation_config.json in"),
        (
            lambda folder: change_json(folder, "tokenizer_config.json", model_max_length="x"),
            "the tokenizer can't be loaded",
        ),
        (
            lambda folder: change_json(folder, "tokenizer_config.json", tool_parser_type="none"),
            "mlx_lm.tool_parsers.none",
        ),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ 'x' * 10**15 }}"), "the chat template in"),
    ],
)
def test_any_damage_is_a_finding(copy_model: Copied, spoil: Callable[[Path], object], what: str) -> None:
    folder = copy_model()
    spoil(folder)
    assert what in list_messages(examine_folder(folder), FindingLevel.FAIL)


def test_unexpected_exception_is_a_finding(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("unheard of")

    folder = tiny_folder("llama", tools=True)
    monkeypatch.setattr("warmline_backend.doctor.examine.check_cache", fails)
    (wrong,) = [finding for finding in examine_folder(folder).findings if finding.level is FindingLevel.FAIL]
    assert wrong.area == "cache" and str(folder) in wrong.what and "ZeroDivisionError: unheard of" in wrong.what
    monkeypatch.setattr("warmline_backend.doctor.files.read_shard", fails)
    assert f"{WEIGHTS} can't be examined: ZeroDivisionError" in list_messages(examine_folder(folder), FindingLevel.FAIL)


def test_end_tokens_of_generation_config_are_used(copy_model: Copied) -> None:
    folder = copy_model()
    (folder / "generation_config.json").write_text('{"eos_token_id": [260, 257]}')
    assert "answers end at <|im_end|>, <tool_call>" in list_messages(examine_folder(folder), FindingLevel.OK)


def test_names_are_escaped_for_terminal(copy_model: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_model()
    change_weights(folder, lambda weights: weights.update({"\x1b[2J[red]" + "x" * 10_000: mx.zeros(1)}))
    assert command.main([str(folder)]) == 1
    output = capsys.readouterr().out
    assert "\x1b" not in output and r"\x1b[2J[red]xxx" in output and len(output) < 10_000
    assert command.main([str(folder) + "\udcff"]) == 1
    assert r"\udcff" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["", "a" * 5000, "owner/" + "b" * 5000, "\x00", "~no_such_user_here/x", "..."])
def test_invalid_folder_names_are_refused(model: str) -> None:
    examination = examine_model(DoctorSettings(model))
    assert examination.verdict is FindingLevel.FAIL and examination.folder is None


def test_quantized_model_is_described(copy_model: Copied) -> None:
    folder = copy_model()

    def quantize(weights: dict[str, mx.array]) -> None:
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            prefix = name.removesuffix("weight")
            packed, scales, biases = mx.quantize(weights[name], group_size=32, bits=4)
            weights |= {name: packed, prefix + "scales": scales, prefix + "biases": biases}

    change_weights(folder, quantize)
    change_json(folder, "config.json", quantization={"bits": 4, "group_size": 32})
    examination = examine_folder(folder)
    assert examination.verdict is FindingLevel.OK
    assert "quantized: 14 modules 4 bits in groups of 32, affine" in list_messages(examination, FindingLevel.OK)


def test_tokenizer_problems_are_found(copy_model: Copied) -> None:
    folder = copy_model()
    change_json(folder, "tokenizer_config.json", chat_template=None)
    assert "there is no chat template" in list_messages(examine_folder(folder), FindingLevel.WARN)
    change_json(folder, "tokenizer_config.json", eos_token=None)
    change_json(folder, "config.json", eos_token_id=None)
    assert "no token is known to end an answer" in list_messages(examine_folder(folder), FindingLevel.FAIL)
    (folder / "tokenizer.json").write_text("{")
    assert "the tokenizer can't be loaded" in list_messages(examine_folder(folder), FindingLevel.FAIL)


@pytest.mark.parametrize(
    ("template", "level", "what"),
    [
        ("{{ raise_exception('not today') }}", FindingLevel.FAIL, "can't be rendered"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", FindingLevel.WARN, "the template leaves out tools"),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            FindingLevel.WARN,
            "refuses system messages",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            FindingLevel.WARN,
            "does not begin with",
        ),
        ("{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}", FindingLevel.WARN, "the date"),
    ],
)
def test_template_problems_are_found(copy_model: Copied, template: str, level: FindingLevel, what: str) -> None:
    folder = copy_model()
    change_json(folder, "tokenizer_config.json", chat_template=template)
    assert what in list_messages(examine_folder(folder), level)


@pytest.mark.parametrize(
    ("refused", "rest", "what"),
    [
        ("", "{{ enable_thinking | default(true) }}", "enable_thinking turns it on and off"),
        ("enable_thinking is defined and not enable_thinking", "", "the template can't turn it off"),
        (
            "(enable_thinking is defined and not enable_thinking)"
            " or reasoning_effort | default('low') not in ['low', 'max']",
            "",
            "the template can't turn it off; requests that turn it off get low effort",
        ),
    ],
)
def test_control_of_reasoning_is_reported(tmp_path: Path, refused: str, rest: str, what: str) -> None:
    condition = "{% if " + (refused or "false") + " %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = make_byte_level_tokenizer(tmp_path, condition + CHATML + rest)
    findings = Findings("tokenizer")
    check_template(findings, tokenizer, {}, {})
    assert any(finding.what.endswith(what) for finding in findings), list(findings)


def test_impossible_kv_quantization_is_found(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("gemma3", tools=True)
    assert "--kv-bits 8: only plain KV caches can be quantized" in list_messages(
        examine_folder(folder, kv_bits=8), FindingLevel.FAIL
    )
    folder = tiny_folder("llama", tools=True)
    assert "--kv-group-size that divides" in list_messages(
        examine_folder(folder, kv_bits=8, kv_group_size=64), FindingLevel.FAIL
    )
    examination = examine_folder(folder, kv_bits=8, kv_group_size=32)
    assert examination.serve_command.endswith(" --kv-bits 8 --kv-group-size 32")
    examination = examine_folder(folder, kv_bits="8,4", kv_group_size=32)
    assert examination.serve_command.endswith(" --kv-bits 8,4 --kv-group-size 32")
    assert "of KV a token: 2 x MixedQuantizedKVCache" in list_messages(examination, FindingLevel.OK)
    examination = examine_folder(folder, kv_bits="8,4", kv_group_size=32, kv_boundary_layers=1, kv_boundary_bits=8)
    assert "the model has 2 layers, and none would be between" in list_messages(examination, FindingLevel.FAIL)


def test_custom_code_is_not_run_without_trust(copy_model: Copied) -> None:
    folder = copy_model()
    change_json(folder, "config.json", model_file="own.py")
    (folder / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    assert "ask again with --trust-remote-code" in list_messages(examine_folder(folder), FindingLevel.FAIL)
    examination = examine_folder(folder, trust_remote_code=True)
    assert "own.py" in list_messages(examination, FindingLevel.WARN)
    assert examination.verdict is FindingLevel.WARN and examination.serve_command.endswith(" --trust-remote-code")


def test_weights_are_not_read(copy_model: Copied) -> None:
    """A file whose tensors are 100 GB of nothing: whoever read them would need as much memory."""
    folder = copy_model()
    vocabulary = HUGE_BYTES // (64 * 4)
    header = {}
    end = 0
    for name, tensor in read_shard(folder / WEIGHTS).tensors.items():
        huge = name in ("model.embed_tokens.weight", "lm_head.weight")
        shape = [vocabulary, 64] if huge else list(tensor.shape)
        size = HUGE_BYTES if huge else tensor.bytes_count
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(LENGTH_BYTES + len(text) + end)
    change_json(folder, "config.json", vocab_size=vocabulary)
    held = read_active_memory()
    mx.reset_peak_memory()
    examination = examine_folder(folder, memory_gb=512)
    assert mx.get_peak_memory() - held < 1 << 20
    assert examination.weights is not None and examination.weights.weight_bytes > 2 * HUGE_BYTES
    assert examination.verdict is FindingLevel.OK and "whole context fit" in list_messages(examination, FindingLevel.OK)


def test_doctor_json_and_exit_codes(copy_model: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_model("gemma3")
    assert command.main([str(folder), "--json", "--memory-gb", "16", "--called", "my model"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"model", "folder", "verdict", "findings", "weights", "cache", "memory", "serve"}
    assert result["verdict"] == "ok" and result["serve"] == "warmline serve --model 'my model'"
    assert all(set(finding) == {"level", "area", "what", "todo"} for finding in result["findings"])
    assert result["cache"]["families"] == ["KVCache", "RotatingKVCache"]
    assert result["cache"]["window_tokens"] == tiny_models.SLIDING_WINDOW and result["cache"]["persistent"] is True
    assert [length["tokens"] for length in result["memory"]["lengths"]] == [8_192, 32_768, 131_072, 200_000]
    assert result["weights"]["bytes"] == result["weights"]["bytes_by_dtype"]["float32"]
    change_json(folder, "tokenizer_config.json", chat_template=None)
    assert command.main([str(folder)]) == 0
    assert "It can be served; see the warnings." in capsys.readouterr().out
    (folder / WEIGHTS).unlink()
    assert command.main([str(folder), "--json"]) == 1
    broken = json.loads(capsys.readouterr().out)
    assert broken["verdict"] == "FAIL" and broken["weights"] is broken["memory"] is None and broken["serve"] == ""
    for usage in (
        ["--memory-gb", "much"],
        ["--memory-gb", "1e300"],
        ["--prefill-step-size", "²"],
        ["--chat-template-args", "[]"],
        ["--chat-template-args", '{"a": NaN}'],
        ["--chat-template-args", '{"tools": 1}'],
    ):
        with pytest.raises(SystemExit) as ended:
            command.main([str(folder), *usage])
        assert ended.value.code == 2
