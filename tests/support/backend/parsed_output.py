"""Output of a family parsed token by token: its parts, text, reasoning and calls."""

import json
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.tool_families import TOOLS
from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser


def encode_text(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def parse_output(
    tokenizer: TokenizerWrapper, text: str, *, natural: bool = True, tail: str = "", **fields: Any
) -> list[Part]:
    expected = ExpectedOutput(has_parts=True, tail=tail, tools=fields.pop("tools", TOOLS), **fields)
    stream = OutputParser(tokenizer, expected=expected)
    parts: list[Part] = []
    for token in encode_text(tokenizer, text):
        if stream.is_stopped:
            return parts
        parts += stream.add(token)
    return parts if stream.is_stopped else [*parts, *stream.finish(natural)]


def join_content(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def join_reasoning(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def list_calls(parts: list[Part]) -> list[tuple[str, Any]]:
    return [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
