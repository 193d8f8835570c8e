"""Loading of a draft model: tokenizers are compared, and what can't work is refused with its reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from support.backend.families import QUANTIZATIONS
from support.device_memory import read_active_memory
from warmline_backend.__main__ import _make_scheduler
from warmline_backend.config import parse_config
from warmline_backend.kv_cache.codecs import CacheLayout, CodecKind
from warmline_backend.model.drafted_model import DraftedModel
from warmline_backend.model.fingerprint import compute_fingerprint
from warmline_backend.model.loader import ModelError, find_model_classes
from warmline_backend.model.model import load_served_model, open_draft_model
from warmline_common.storage.home import Home

FolderOf = Callable[..., Path]


@pytest.fixture
def draft(tiny_folder: FolderOf, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "draft"))


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refuse(target: Path, draft: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load_served_model(str(target), "m", draft_path=str(draft))
    assert str(refused.value).startswith(f"--draft-model {draft}: ")
    return str(refused.value)


def test_leaves_of_the_draft_model_come_behind_those_of_the_model(tiny_folder: FolderOf) -> None:
    """So stored KV of the model alone would keep its names; the fingerprint tells the two apart all the same."""
    folder, draft = tiny_folder("llama"), tiny_folder("qwen3_5")
    alone = load_served_model(str(folder), "m")
    both = load_served_model(str(folder), "m", draft_path=str(draft))
    count = len(alone.layout.leaves)
    assert [leaf.name for leaf in both.layout.leaves[:count]] == [leaf.name for leaf in alone.layout.leaves]
    assert both.row_names > alone.row_names and both.row_bytes > alone.row_bytes and both.state_bytes
    assert both.weight_bytes > alone.weight_bytes and both.dtype == alone.dtype
    assert both.layout.has_states and not alone.layout.has_states
    assert isinstance(both.model, DraftedModel) and both.vocabulary_size == alone.vocabulary_size


def test_quantized_kv_is_the_models_alone(tiny_folder: FolderOf) -> None:
    folder = tiny_folder("llama")
    served = load_served_model(str(folder), "m", quantization=QUANTIZATIONS["quantized"], draft_path=str(folder))
    kinds = [type(leaf.template).__name__ for leaf in served.layout.leaves]
    assert kinds == ["QuantizedKVCache"] * 2 + ["KVCache"] * 2
    assert served.describe_layout().dtype == "q8"


def test_passes_leave_no_graph_behind(tiny_folder: FolderOf) -> None:
    """Rows of the draft model are evaluated with the logits, though its own logits never are."""
    served = load_served_model(str(tiny_folder("llama")), "m", draft_path=str(tiny_folder("gemma3")))
    layers = served.layout.make_empty_cache()
    mx.eval(served.model(mx.array([[1, 2, 3]]), cache=layers))
    before = read_active_memory()
    for token in range(60):
        mx.eval(served.model(mx.array([[token]]), cache=layers))
    assert mx.get_active_memory() - before < 1 << 20


def test_other_tokenizers_are_refused_with_their_differences(tiny_folder: FolderOf, draft: Path) -> None:
    def swap(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    change_json(draft / "tokenizer.json", swap)
    problem = refuse(tiny_folder("llama"), draft)
    assert (
        "another one than the model's (of 263 tokens, the model's of 263): 'a' is 65, not 64; 'b' is 64, not 65; choose"
        in problem
    )


def test_added_tokens_are_compared(tiny_folder: FolderOf, draft: Path) -> None:
    def rename(content: Any) -> None:
        content["added_tokens"][0]["content"] = "<|other|>"

    change_json(draft / "tokenizer.json", rename)
    problem = refuse(tiny_folder("llama"), draft)
    assert "'<|other|>' (256, which is '<|im_start|>' of the model) is none of the model's" in problem


def test_texts_are_tokenized_alike(tiny_folder: FolderOf, draft: Path) -> None:
    change_json(draft / "tokenizer.json", lambda content: content["pre_tokenizer"].update(add_prefix_space=True))
    problem = refuse(tiny_folder("llama"), draft)
    assert "with the same tokens: 'The quick brown fox jumps over the lazy ...' becomes [" in problem


def test_added_token_of_one_tokenizer_does_no_harm(tiny_folder: FolderOf, draft: Path) -> None:
    extra = {"id": 263, "content": "<|extra|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    change_json(draft / "tokenizer.json", lambda content: content["added_tokens"].append({**extra, **flags}))
    for target, drafting in ((tiny_folder("llama"), draft), (draft, tiny_folder("llama"))):
        assert load_served_model(str(target), "m", draft_path=str(drafting)).draft is not None


def test_embedding_with_too_few_rows_is_refused_and_padding_is_not(tiny_folder: FolderOf, draft: Path) -> None:
    weights: Any = mx.load(str(draft / "model.safetensors"))
    mx.eval(weights)
    tables = [name for name, array in weights.items() if array.shape[0] == 263 and array.ndim == 2]

    def resize(rows: int) -> None:
        for name in tables:
            padded = mx.concatenate([weights[name], mx.zeros((100, weights[name].shape[1]))])
            weights_of[name] = padded[:rows]
        mx.save_safetensors(str(draft / "model.safetensors"), weights_of, {"format": "mlx"})
        change_json(draft / "config.json", lambda content: content.update(vocab_size=rows))

    weights_of = dict(weights)
    resize(260)
    assert "has ids up to 262, and its embedding 260 rows" in refuse(tiny_folder("llama"), draft)
    resize(300)
    served = load_served_model(str(tiny_folder("llama")), "m", draft_path=str(draft))
    assert served.draft is not None and served.draft.vocabulary_size == 300
    # The other way round, a prompt may have an id of the model's padding.
    padded = load_served_model(str(draft), "m", draft_path=str(tiny_folder("llama")))
    kv = padded.make_kv(journals=False)
    kv.prefill(padded.model, [299, 1, 2])
    assert kv.length == 3


def test_what_is_no_model_is_refused(tiny_folder: FolderOf, draft: Path, tmp_path: Path) -> None:
    target = tiny_folder("llama")
    assert "there is no such folder" in refuse(target, tmp_path / "none")
    assert "it has no config.json" in refuse(target, tmp_path)
    change_json(draft / "config.json", lambda content: content.update(model_type="nothing"))
    assert "Model type nothing not supported" in refuse(target, draft)


def test_learned_positions_are_refused(tiny_folder: FolderOf, draft: Path) -> None:
    """Positions beyond the table would be read from anywhere."""
    config = {"model_type": "gpt2", "n_ctx": 64, "n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 64}
    config |= {"layer_norm_epsilon": 1e-5, "vocab_size": 263, "eos_token_id": 257}
    model_class, args_class = find_model_classes(config)
    model: Any = model_class(args_class.from_dict(config))  # type: ignore[attr-defined]
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(draft / "model.safetensors"), weights, {"format": "mlx"})
    (draft / "config.json").write_text(json.dumps(config))
    assert "its positions are learned" in refuse(tiny_folder("llama"), draft)


def test_cache_without_codec_is_refused(tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder("llama")
    tokenizer = load_served_model(str(folder), "m").tokenizer
    problem = CacheLayout(list, [], (), "no codec for the cache class Odd")
    monkeypatch.setattr(CacheLayout, "from_factory", lambda _: problem)
    with pytest.raises(ModelError, match="no codec for the cache class Odd, and a draft model's KV is kept beside"):
        open_draft_model(str(folder), tokenizer, 263, trust_remote_code=False)


@pytest.mark.parametrize(("flags", "is_loaded"), [([], True), (["--speculation", "off"], False)])
def test_draft_model_is_loaded_unless_speculation_is_off(
    tiny_folder: FolderOf, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: list[str], is_loaded: bool
) -> None:
    draft = str(tiny_folder("gemma3"))
    words = ["--home", str(tmp_path), "--model", str(tiny_folder("llama")), "--draft-model", draft, *flags]
    home = Home(tmp_path)
    home.prepare()
    scheduler = _make_scheduler(parse_config([*words, "--warm-up-s", "0.1"]), home, "boot")
    assert (scheduler.served.draft is not None) is is_loaded
    assert (f"the draft model {draft} is not loaded: speculation is off" in caplog.text) is not is_loaded


def test_fingerprint_has_the_draft_model(tiny_folder: FolderOf, draft: Path, tmp_path: Path) -> None:
    def fingerprint(path: Path | None) -> str:
        return compute_fingerprint(tiny_folder("llama"), None, None, "float32", tmp_path, draft_path=path)

    alone, with_draft = fingerprint(None), fingerprint(draft)
    assert alone == compute_fingerprint(tiny_folder("llama"), None, None, "float32", tmp_path)
    assert with_draft != alone and with_draft == fingerprint(tiny_folder("llama")), "its path does not matter"
    change_json(draft / "config.json", lambda content: content.update(rope_theta=5e3))
    assert fingerprint(draft) != with_draft


def test_draft_leaves_are_evaluated_last_layer_by_layer(tiny_folder: FolderOf) -> None:
    served = load_served_model(str(tiny_folder("llama")), "m", draft_path=str(tiny_folder("qwen3_5")))
    kv = served.make_kv(journals=False)
    pauses = sum(1 for _ in kv.prefill_by_layers(served.model, [1, 2, 3]))
    assert pauses == len(served.layout.leaves) and kv.length == 3
    assert served.layout.leaves[-1].codec.kind in (CodecKind.ROWS, CodecKind.STATE)
