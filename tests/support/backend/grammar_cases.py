"""Byte-level tokenizers with one family's markers each, and random walks through grammars."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.backend import tool_families
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.matcher import Matcher

EOS = "<|im_end|>"
PADDING = 9  # rows of logits that stand for no token
THINKS = ("<think>", "</think>")

# Families that tool_families.py has no calls of: what their tokenizers have besides bytes.
MARKERS: dict[str, tuple[str, ...]] = {
    "laguna": ("<tool_call>", "</tool_call>"),
    "mistral list": ("[TOOL_CALLS]",),
    "muse_spark": (),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}


def make_tokenizer(
    folder: Path, markers: Iterable[str], parser: str = "", *, template: str = "", thinks: bool = False
) -> TokenizerWrapper:
    """Make a tokenizer with one token a byte, and one a marker."""
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        words = [EOS, *markers, *(THINKS if thinks else ())]
        made.add_tokens([AddedToken(word, special=word == EOS or word.startswith("[")) for word in words])
        made.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
        settings |= {"tool_parser_type": parser} if parser else {}
        settings |= {"chat_template": template} if template else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load(folder)


def make_family_tokenizer(name: str, folder: Path) -> TokenizerWrapper:
    if (family := tool_families.BY_NAME.get(name)) is not None:
        return family.tokenizer(folder)
    return make_tokenizer(folder / name.replace(" ", "-"), MARKERS[name], name.partition(" ")[0])


def make_compiler(tokenizer: TokenizerWrapper) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer) + PADDING)


def sample_tokens(matcher: Matcher, seed: int, steps_max: int = 600) -> list[int]:
    """Draw allowed tokens at random up to the end of the answer, which is left out."""
    draw, tokens = np.random.default_rng(seed), list[int]()
    for _ in range(steps_max):
        token = int(draw.choice(np.flatnonzero(matcher.compute_allowed())))
        matcher.advance(token)
        if matcher.is_complete:
            return tokens
        tokens.append(token)
    raise AssertionError(f"no end after {steps_max} tokens")


def is_accepted(matcher: Matcher, tokens: Iterable[int]) -> bool:
    """True if the matcher lets these tokens be sampled, one by one."""
    for token in tokens:
        if matcher.state not in ("free", "reasoning") and not matcher.compute_allowed()[token]:
            return False
        matcher.advance(token)
    return True
