"""Tokenizers that schemas are compiled for: the demo model's, and ones with a token a byte.

The byte tokenizers have the markers of no family, or those of a family whose calls are JSON, or tags.
"""

import contextlib
import sys
from functools import lru_cache
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper, load

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import tiny_models  # noqa: E402  (lives with the tests, which own it)
from support.backend import tool_families  # noqa: E402
from warmline_backend import demo  # noqa: E402
from warmline_backend.model.loader import read_config  # noqa: E402
from warmline_backend.model.model import find_vocabulary_size, load_model_tokenizer  # noqa: E402
from warmline_backend.output.expected import ExpectedOutput  # noqa: E402
from warmline_backend.request.params import Tools  # noqa: E402
from warmline_backend.structured_output.compiler import GrammarCompiler  # noqa: E402
from warmline_backend.structured_output.constraint import Constraint  # noqa: E402
from warmline_backend.structured_output.matcher import Matcher  # noqa: E402
from warmline_common.storage.home import Home  # noqa: E402

NAMES = ("demo", "bytes")
TOOL_NAMES = ("json_tools", "qwen3_coder")
THOUGHT = "<think></think>"  # the prompt has closed the reasoning


@lru_cache
def load_tokenizer(name: str, cache: Path) -> tuple[TokenizerWrapper, int]:
    """Load a tokenizer and its vocabulary's size; it is made in `cache` where it is missing."""
    if name == "demo":
        with contextlib.redirect_stdout(sys.stderr):
            folder = demo.prepare_demo_model(Home(cache / "home"), "q4")
        config = read_config(folder)
        tokenizer = load_model_tokenizer(folder, config, trust_remote_code=False)
        return tokenizer, find_vocabulary_size(config, tokenizer)
    if name in TOOL_NAMES:
        tokenizer = tool_families.BY_NAME[name].tokenizer(cache / "tokenizers")
        return tokenizer, len(tokenizer)
    folder = cache / "tokenizers" / "bytes"
    if not folder.exists():
        folder.mkdir(parents=True)
        tiny_models.write_tokenizer(folder)
    return load(folder), tiny_models.VOCABULARY


@lru_cache
def make_compiler(name: str, cache: Path) -> GrammarCompiler:
    tokenizer, vocabulary_size = load_tokenizer(name, cache)
    compiler = GrammarCompiler(tokenizer, vocabulary_size)
    compiler.prepare_tokenizer()
    return compiler


def create_matcher(name: str, cache: Path, constraint: Constraint, tools: Tools = None) -> Matcher:
    """Create the matcher of one answer: content, or calls of `tools`."""
    expected = ExpectedOutput(has_parts=tools is not None, tail=THOUGHT, tools=tools)
    return make_compiler(name, cache).create_matcher(constraint, expected)
