"""Custom tools, which take free text: for the model functions of one string, `input`.  Pure."""

import json
from collections.abc import Mapping
from typing import Any

from warmline_common.protocol.json_structure import decode_json_text

JsonObject = dict[str, Any]

INPUT_ARGUMENT = "input"


def build_function(name: str, description: object, grammar: Mapping[str, Any] | None) -> JsonObject:
    """Chat's `function` of a custom tool.  `grammar`: `syntax` and `definition`, told to the model, not enforced."""
    parts = [description]
    if grammar and isinstance(definition := grammar.get("definition"), str):
        parts.append(f"'{INPUT_ARGUMENT}' must follow this {grammar.get('syntax') or 'lark'} grammar:\n{definition}")
    text: JsonObject = {"type": "string", "description": "The tool's input, as plain text."}
    parameters = {
        "type": "object",
        "properties": {INPUT_ARGUMENT: text},
        "required": [INPUT_ARGUMENT],
        "additionalProperties": False,
    }
    joined = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    return {"name": name, "description": joined, "parameters": parameters}


def encode_arguments(text: str) -> str:
    """Arguments of a custom tool's call, as the model writes them."""
    return json.dumps({INPUT_ARGUMENT: text}, ensure_ascii=False)


def decode_input(arguments: str) -> str:
    """Input in a custom tool's arguments; the arguments themselves where they have another form."""
    try:
        given = decode_json_text(arguments)
    except ValueError:
        return arguments
    text = given.get(INPUT_ARGUMENT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
