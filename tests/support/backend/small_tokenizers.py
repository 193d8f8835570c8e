"""Small real tokenizers: with templates, a byte-level BPE with merges, as most models have, and one like Llama 2's.

Then one of each kind that models have, with added tokens that overlap each other (`KINDS`).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

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


# ---- kinds

PLAIN = ["<|im_start|>", "<|im_end|>", "<|im_start|>user", "|><|", "im_", "<unk>", "</s>", "▁▁", "\n\n\n"]
NORMALIZED = [
    AddedToken("<think>", normalized=True),
    AddedToken("</think>", normalized=True, lstrip=True, rstrip=True),
    AddedToken("word", normalized=True, single_word=True),
]
WORDS = [
    "the quick brown fox jumps over the lazy dog",
    "you are a helpful assistant",
    "what is 1234 + 5678?",
    "naïve café",
]
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_gpt_2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(WORDS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return _add_tokens(tokenizer)


def make_llama_3() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(LLAMA_3_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.normalizer = normalizers.NFC()  # as Qwen has it
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(WORDS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    _add_tokens(tokenizer)
    start = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", _id(tokenizer))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), start])
    return tokenizer


def make_llama_2() -> Tokenizer:
    tokenizer = _make_byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _add_tokens(tokenizer)


def make_mistral() -> Tokenizer:
    """Metaspace before the text's first word alone."""
    tokenizer = _make_byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _add_tokens(tokenizer)


def make_gemma() -> Tokenizer:
    tokenizer = _make_byte_fallback()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    return _add_tokens(tokenizer)


def make_unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(WORDS * 20, trainer)
    return _add_tokens(tokenizer)


def make_word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    _add_tokens(tokenizer)
    tokenizer.post_processor = processors.BertProcessing(("</s>", _id(tokenizer)), ("</s>", _id(tokenizer)))
    return tokenizer


def make_without_separators() -> Tokenizer:
    """Special tokens that take the spaces behind them, as Phi-3 has."""
    tokenizer = make_gpt_2()
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt_2": make_gpt_2,
    "llama_3": make_llama_3,
    "llama_2": make_llama_2,
    "mistral": make_mistral,
    "gemma": make_gemma,
    "unigram": make_unigram,
    "word_piece": make_word_piece,
    "without_separators": make_without_separators,
}


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _make_byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz<|>_"]
    pieces += ["▁h", "▁t", "he", "▁the", "im", "<|"]
    merges = [("▁", "h"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "m"), ("<", "|")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))


def _add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    tokenizer.add_tokens(NORMALIZED)
    return tokenizer


def _id(tokenizer: Tokenizer) -> int:
    token = tokenizer.token_to_id("</s>")
    assert token is not None
    return token
