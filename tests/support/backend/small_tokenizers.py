"""Small real tokenizers: a byte-level BPE with merges, as most models have, and one like SentencePiece's."""

import json
from collections.abc import Sequence
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TEXT = ["the quick brown fox jumps over the lazy dog", "you are a helpful assistant", "what is the capital of France"]

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_byte_level_tokenizer(folder: Path, template: str | None = CHATML) -> TokenizerWrapper:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=text.startswith("<|")) for text in SPECIAL])
    return _save_and_load(tokenizer, folder, template, eos="<|im_end|>")


def make_marked_tokenizer(folder: Path, markers: Sequence[str], template: str, **defaults: str) -> TokenizerWrapper:
    """Byte tokenizer with special tokens of its own beside ChatML's end; `defaults` are those of its model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    single = [marker for marker in markers if marker]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", *single)])
    return _save_and_load(tokenizer, folder, template, eos="<|im_end|>", **defaults)


def make_sentence_piece_tokenizer(folder: Path, template: str | None = CHATML) -> TokenizerWrapper:
    """Metaspace with byte fallback, whose decoder drops the first space, as Llama 2's does."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    pieces += ["▁h", "▁t", "he", "▁the"]
    merges = [("▁", "h"), ("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return _save_and_load(tokenizer, folder, template, eos="</s>")


def _save_and_load(
    tokenizer: Tokenizer, folder: Path, template: str | None, eos: str, **defaults: str
) -> TokenizerWrapper:
    """Save and load, as a model's tokenizer comes from files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | ({"chat_template": template} if template else {}))
    )
    return load(folder, defaults=defaults)
