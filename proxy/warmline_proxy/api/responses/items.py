"""Conversion of the Responses API's input items into chat messages.  Pure.

The items of one answer (reasoning, text, calls) become one assistant message again, always in the same way: so the
rendered prompt repeats, and equals that of the same conversation through chat.
"""

import base64
import binascii
import re
from collections.abc import Callable
from typing import Any

from warmline_common.protocol.media_parts import describe_refusal, find_placeholder, join_parts
from warmline_common.protocol.misspelling import explain_missing
from warmline_proxy.api.custom_tools import JsonObject, encode_arguments
from warmline_proxy.api.responses.history import StoredItem, decode_item, find_type
from warmline_proxy.api.responses.tools import qualify_name
from warmline_proxy.errors import bad_request

ROLES = ("user", "assistant", "system", "developer")
ADDITIONAL_TOOLS = "additional_tools"
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})

# Items of tools that ran on OpenAI's servers; no model here has seen their content.
SKIPPED_TYPES = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"}
    | {"computer_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"}
)

_REASONING_PREFIX = "warmline.1."
_OWN_ID = re.compile(r"(?:rs|msg|fc|ctc)_(.+)_[0-9]+")


def item_id(prefix: str, answer_id: str, index: int) -> str:
    """Item id with the answer's id, by which the answer's items are joined again."""
    return f"{prefix}_{answer_id}_{index}"


def encode_reasoning(reasoning: str) -> str:
    """`encrypted_content` of a text.  Not encrypted: the client gets the same text in plain."""
    return _REASONING_PREFIX + base64.b64encode(reasoning.encode()).decode()


def decode_reasoning(text: object) -> str:
    """Text of our `encrypted_content`; "" for another server's."""
    if not isinstance(text, str) or not text.startswith(_REASONING_PREFIX):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_REASONING_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def read_input(instructions: object, earlier: list[StoredItem], value: object) -> list[JsonObject]:
    """Messages of `instructions`, the items of the previous response, and `input`.  Raises ClientError 400."""
    reader = _ItemReader()
    if instructions not in (None, ""):
        reader.add_all(instructions, "instructions", "system", "'instructions' must be a string.")
    reader.add_all(earlier, "previous_response_id", "user", "")
    reader.add_all(value, "input", "user", "'input' must be a string or a list of items.")
    return reader.messages


class _ItemReader:
    """Reads items in order; an assistant's items are joined into the open message."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self._open_message: JsonObject | None = None  # an assistant's message that further items may join
        self._answer_id = ""  # of the open message; "" where unknown
        self._has_results = False  # its calls have results
        self._readers: dict[str, Callable[[JsonObject, str], None]] = {
            "message": self._read_message,
            "reasoning": self._read_reasoning,
            "function_call": self._read_tool_call,
            "custom_tool_call": self._read_tool_call,
            "function_call_output": self._read_tool_output,
            "custom_tool_call_output": self._read_tool_output,
            "agent_message": self._read_agent_message,
            ADDITIONAL_TOOLS: lambda item, where: None,  # read with the request's other tools
        }

    def add_all(self, value: object, field: str, role: str, problem: str) -> None:
        """Read a field's value: a text of that role, or items.  Raises ClientError 400, with `problem` for others."""
        if isinstance(value, str):
            self._add_message(role, value)
        elif isinstance(value, list):
            for place, item in enumerate(value):
                self._add(item, f"{field}[{place}]")
        else:
            raise bad_request(problem, param=field)

    def _add(self, item: object, where: str) -> None:
        if not isinstance(item, dict | StoredItem):
            raise bad_request(f"'{where}' must be an object.", param=where)
        kind = find_type(item) or "message"
        if not isinstance(kind, str) or kind not in self._readers.keys() | SKIPPED_TYPES:
            message = f"'{where}' is of type \"{str(kind)[:40]}\", which can't be read here."
            raise bad_request(message, param=where)
        if kind not in SKIPPED_TYPES:
            self._readers[kind](decode_item(item), where)

    def _add_message(self, role: str, text: str) -> None:
        self._open_message = None
        self.messages.append({"role": role, "content": text})

    def _read_message(self, item: JsonObject, where: str) -> None:
        _check_spelling(item, "role", where)
        if item.get("role") != "assistant":
            _check_spelling(item, "content", where)
        role, text = item.get("role"), _read_text(item.get("content"), f"{where}.content")
        if role not in ROLES:
            raise bad_request(f"'{where}.role' must be one of {', '.join(ROLES)}.", param=f"{where}.role")
        if role != "assistant":
            return self._add_message(role, text)
        message = self._join_assistant(item, after=("content", "tool_calls"))
        message["content"] = (message["content"] or "") + text

    def _read_agent_message(self, item: JsonObject, where: str) -> None:
        """Read a message between a client's agents; Codex sends text written here as encrypted_content."""
        parts = item.get("content") or []
        if isinstance(parts, list):
            parts = [_decode_part(part) for part in parts]
        self._add_message("user", _read_text(parts, f"{where}.content"))

    def _read_reasoning(self, item: JsonObject, where: str) -> None:
        text = (
            _read_text(item.get("content") or [], f"{where}.content")
            or decode_reasoning(item.get("encrypted_content"))
            or _read_text(item.get("summary") or [], f"{where}.summary")
        )
        if text:
            message = self._join_assistant(item, after=("reasoning_content", "content", "tool_calls"))
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _read_tool_call(self, item: JsonObject, where: str) -> None:
        custom = item.get("type") == "custom_tool_call"
        name = qualify_name(item.get("namespace"), _read_string(item, "name", where))
        arguments = _read_string(item, "input" if custom else "arguments", where)
        function = {"name": name, "arguments": encode_arguments(arguments) if custom else arguments}
        call = {"id": _read_string(item, "call_id", where), "type": "function", "function": function}
        self._join_assistant(item, after=()).setdefault("tool_calls", []).append(call)

    def _read_tool_output(self, item: JsonObject, where: str) -> None:
        text = _read_text(item.get("output"), f"{where}.output", with_placeholders=True)
        self.messages.append({"role": "tool", "tool_call_id": _read_string(item, "call_id", where), "content": text})
        self._has_results = True

    def _join_assistant(self, item: JsonObject, after: tuple[str, ...]) -> JsonObject:
        """Message that an item belongs to: the open message where both come from one answer, else a new message.

        Without ids, the open message unless its calls have results, or it has a field of `after`, which come after
        such an item in an answer.
        """
        own_id = _OWN_ID.fullmatch(str(item.get("id")))
        answer_id = own_id[1] if own_id else ""
        if self._open_message is not None:
            if answer_id and self._answer_id:
                is_same_answer = answer_id == self._answer_id
            else:
                is_same_answer = not self._has_results and not any(self._open_message.get(key) for key in after)
            if is_same_answer:
                self._answer_id = self._answer_id or answer_id
                return self._open_message
        self._open_message = {"role": "assistant", "content": None}
        self._answer_id, self._has_results = answer_id, False
        self.messages.append(self._open_message)
        return self._open_message


def _read_text(content: object, where: str, with_placeholders: bool = False) -> str:
    """Joined text of a string or parts.  Images and files are refused, or become a line that says so."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"'{where}' must be a string or a list of parts.", param=where)
    return join_parts(_read_part(part, f"{where}[{place}]", with_placeholders) for place, part in enumerate(content))


def _read_part(part: Any, where: str, with_placeholders: bool) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in TEXT_PARTS:
        return _read_string(part, "text", where)
    if kind == "refusal":
        return _read_string(part, "refusal", where)
    if with_placeholders and (placeholder := find_placeholder(kind)):
        return placeholder
    raise bad_request(f"'{where}' is {describe_refusal(kind)}.", param=where)


def _check_spelling(item: JsonObject, name: str, where: str) -> None:
    """Raise ClientError 400 for an item that lacks a field and has it under another name."""
    if item.get(name) is None and (hint := explain_missing(name, item, "item")):
        raise bad_request(f"'{where}.{name}' {hint}.", param=f"{where}.{name}")


def _decode_part(part: Any) -> Any:
    is_sealed = isinstance(part, dict) and part.get("type") == "encrypted_content"
    return {"type": "text", "text": part.get("encrypted_content")} if is_sealed else part


def _read_string(item: JsonObject, name: str, where: str) -> str:
    if isinstance(value := item.get(name), str):
        return value
    raise bad_request(f"'{where}.{name}' must be a string.", param=f"{where}.{name}")
