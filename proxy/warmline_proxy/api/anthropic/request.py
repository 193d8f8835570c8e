"""Conversion of a Messages body into OpenAI's chat body.  Pure.

system            a system message before all others; messages of the role system stay in place
text              content, one string or several parts; the renderer joins them, so both forms render the same.
                  Blocks end with a new line, but not in an assistant's message, which must render as sampled
thinking          reasoning_content; redacted_thinking is unreadable and left out
tool_use          tool_calls;  tool_result  a message of the role tool, in place
cache_control     ignored, as every unknown field: reusable prefixes are found by comparing tokens

Tools that run at Anthropic (web_search ...) are left out: they can't be run here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from warmline_common.protocol.json_structure import convert_integer
from warmline_common.protocol.media_parts import describe_refusal, find_placeholder
from warmline_proxy.api.base import PASSTHROUGH_FIELDS, Fields
from warmline_proxy.errors import bad_request
from warmline_proxy.http.body_fields import decode_body, parse_object

ChatMessage = dict[str, Any]
ChatContent = str | list[dict[str, str]]

ERROR_PREFIX = "Error: "  # before a failed tool's output, unless that says so itself

CUSTOM_TYPES = (None, "custom")
# Run by the client, but their definitions are known to Anthropic's models alone.
CLIENT_TOOL_PREFIXES = ("bash_", "text_editor_", "computer_", "memory_")
MISSING_SCHEMA = (
    """Field required: a JSON schema of the tool's arguments, such as {"type": "object", "properties": {}}"""
)
_OWN_TOOL_USE_ID = re.compile(r"toolu_([0-9a-f]{24})")


class ContentBlock(msgspec.Struct):
    """One content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None  # an object, or anything in a malformed call
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[ContentBlock | str] | None" = None
    is_error: bool | None = None
    source: Any = None  # an object; a string in a search result


Content = str | list[ContentBlock | str]  # a string among blocks is a text


class MessageParam(msgspec.Struct):
    role: str
    content: Content


class ToolSpec(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct):
    type: str | None = None  # None, without a schema: nothing is asked for
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class ThinkingConfig(msgspec.Struct, omit_defaults=True):
    type: str
    budget_tokens: int | float | None = None


class RequestMetadata(msgspec.Struct):
    user_id: str | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    """Fields of a body that are read."""

    messages: list[MessageParam] | None = None
    model: str | None = None
    max_tokens: int | float | None = None  # JSON may spell an integer 20.0; `read_body` leaves an int
    system: Content | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # older place of output_config.format
    metadata: RequestMetadata | None = None
    others: Mapping[str, msgspec.Raw] = {}  # all fields as they came, without nulls

    @property
    def user_id(self) -> str:
        return (self.metadata.user_id if self.metadata else None) or ""


def read_body(body: bytes) -> MessagesBody:
    """Raises ClientError 400."""
    fields = parse_object(body)
    fields.pop("others", None)
    try:
        parsed = decode_body(body, MessagesBody)
    except msgspec.ValidationError as error:  # such as "Expected `str`, got `int` - at `$.messages[0].role`"
        what, _, where = str(error).replace("int | float", "int").partition(" - at ")
        path = where.strip("`").removeprefix("$").replace("[", ".").replace("]", "").strip(".")
        raise bad_request(f"{path}: {what}" if path else what, param=path or None) from None
    limit = convert_integer(parsed.max_tokens)
    if parsed.max_tokens is not None and limit is None:
        raise bad_request(f"'max_tokens' must be an integer, not {parsed.max_tokens}", param="max_tokens")
    parsed.max_tokens, parsed.others = limit, fields
    return parsed


def build_chat_fields(body: MessagesBody) -> Fields:
    """Raises ClientError 400."""
    system = _convert_content(body.system or "", "system")
    messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    messages += _convert_messages(body.messages)
    fields: Fields = {name: value for name, value in body.others.items() if name in PASSTHROUGH_FIELDS}
    fields["messages"] = messages
    if body.max_tokens is not None:
        fields["max_tokens"] = max(1, body.max_tokens) if body.max_tokens >= 0 else body.max_tokens
    if words := [word for word in body.stop_sequences or () if word]:
        fields["stop"] = words
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:  # a partial answer to continue
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return fields | convert_tools(body.tools or [], body.tool_choice) | _convert_thinking(body) | _convert_format(body)


def _convert_messages(messages: Sequence[MessageParam] | None) -> list[ChatMessage]:
    if not messages:
        raise bad_request("messages: at least one message is required", param="messages")
    return [read for i, message in enumerate(messages) for read in _convert_message(message, f"messages.{i}")]


def _convert_message(message: MessageParam, where: str) -> Iterator[ChatMessage]:
    if message.role == "system":
        return iter([{"role": "system", "content": _convert_content(message.content, f"{where}.content")}])
    if message.role not in ("user", "assistant"):
        raise bad_request(f"{where}.role: must be user, assistant or system", param="messages")
    if isinstance(message.content, str):
        return iter([{"role": message.role, "content": message.content}])
    convert = _convert_user if message.role == "user" else _convert_assistant
    return convert(_list_blocks(message.content), f"{where}.content")


def _convert_user(blocks: Sequence[ContentBlock], where: str) -> Iterator[ChatMessage]:
    """Texts and tool results, in order; empty texts beside a tool result are dropped."""
    texts, has_results = list[str](), False
    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_read_text(block, f"{where}.{i}"))
            continue
        if any(texts):
            yield {"role": "user", "content": _join_texts(_separate_texts(texts))}
        texts, has_results = [], True
        yield _convert_tool_result(block, f"{where}.{i}")
    if any(texts) or not has_results:
        yield {"role": "user", "content": _join_texts(_separate_texts(texts))}


def _convert_assistant(blocks: Sequence[ContentBlock], where: str) -> Iterator[ChatMessage]:
    """One message of reasoning, text and tool calls."""
    reasoning, texts, tool_calls = "", list[str](), list[dict[str, Any]]()
    for i, block in enumerate(blocks):
        if block.type == "thinking":
            reasoning += block.thinking or ""
        elif block.type == "tool_use":
            tool_calls.append(_convert_tool_call(block, f"{where}.{i}"))
        elif block.type != "redacted_thinking":
            texts.append(_read_text(block, f"{where}.{i}"))
    message: ChatMessage = {"role": "assistant", "content": _join_texts(texts)}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    yield message


def _convert_tool_call(block: ContentBlock, where: str) -> dict[str, Any]:
    if not block.id or not block.name:
        raise bad_request(f"{where}: a tool_use needs an id and a name", param="messages")
    value = {} if block.input is None else block.input
    arguments = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return {"id": call_id(block.id), "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _convert_tool_result(block: ContentBlock, where: str) -> ChatMessage:
    if not block.tool_use_id:
        raise bad_request(f"{where}.tool_use_id: Field required", param="messages")
    content = _convert_content(block.content or "", f"{where}.content", with_placeholders=True)
    if block.is_error and "error" not in str(content)[:100].lower():
        content = ERROR_PREFIX + content if isinstance(content, str) else [_text_part(ERROR_PREFIX), *content]
    return {"role": "tool", "tool_call_id": call_id(block.tool_use_id), "content": content}


def _convert_content(content: Content, where: str, *, with_placeholders: bool = False) -> ChatContent:
    if isinstance(content, str):
        return content
    texts = [_read_text(block, f"{where}.{i}", with_placeholders) for i, block in enumerate(_list_blocks(content))]
    return _join_texts(_separate_texts(texts))


def _list_blocks(content: Sequence[ContentBlock | str]) -> list[ContentBlock]:
    return [ContentBlock("text", block) if isinstance(block, str) else block for block in content]


def _separate_texts(texts: Sequence[str]) -> list[str]:
    """Texts that end a line, except the last and those with white space before the next."""
    nonempty = [text for text in texts if text]
    ends = ["" if one[-1].isspace() or other[0].isspace() else "\n" for one, other in pairwise(nonempty)]
    return [text + end for text, end in zip(nonempty, [*ends, ""], strict=True)] if nonempty else []


def _join_texts(texts: Sequence[str]) -> ChatContent:
    """Content of several texts: parts, so that the ends of blocks stay visible; one text is a string."""
    texts = [text for text in texts if text]
    return [_text_part(text) for text in texts] if len(texts) > 1 else "".join(texts)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _read_text(block: ContentBlock, where: str, with_placeholders: bool = False) -> str:
    """Text of a block, or its placeholder.  Raises ClientError 400 where it has neither."""
    if block.type == "text":
        if block.text is None:
            raise bad_request(f"{where}.text: Field required", param="messages")
        return block.text
    source = block.source if isinstance(block.source, dict) else {}
    if block.type == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    if block.type == "search_result":
        return "".join(_read_text(each, where) for each in _list_blocks(block.content or []))
    if block.type == "tool_reference":
        return block.tool_name or ""
    if with_placeholders and (placeholder := find_placeholder(block.type)):
        return placeholder
    raise bad_request(f"{where}: {describe_refusal(block.type)}", param="messages")


def _convert_thinking(body: MessagesBody) -> Fields:
    fields: Fields = {}
    if body.thinking:
        fields["thinking"] = msgspec.to_builtins(body.thinking)
    effort = body.output_config.effort if body.output_config else None
    if effort and not (body.thinking and body.thinking.type == "disabled"):
        fields["reasoning_effort"] = effort
    return fields


def _convert_format(body: MessagesBody) -> Fields:
    form = (body.output_config.format if body.output_config else None) or body.output_format
    if form is None or form == OutputFormat():
        return {}
    if form.type != "json_schema" or form.schema is None:
        raise bad_request("output_config.format: must be of type json_schema, with a schema", param="output_config")
    schema = {"name": "answer", "schema": form.schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


# ---- tools


def convert_tools(tools: Sequence[ToolSpec], choice: ToolChoice | None) -> Fields:
    """Raises ClientError 400."""
    converted = (_convert_tool(tool, f"tools.{i}") for i, tool in enumerate(tools))
    functions = [function for function in converted if function]
    fields: Fields = {"tools": functions} if functions else {}
    if choice is None:
        return fields
    if choice.disable_parallel_tool_use and functions:
        fields["parallel_tool_calls"] = False
    return fields | _convert_choice(choice, {tool["function"]["name"] for tool in functions})


def list_tool_places(tools: Sequence[ToolSpec]) -> tuple[str, ...]:
    """Places of the tools that `convert_tools` converts.  Raises ClientError 400."""
    return tuple(f"tools[{i}]" for i, tool in enumerate(tools) if _convert_tool(tool, f"tools.{i}"))


def _convert_tool(tool: ToolSpec, where: str) -> dict[str, Any] | None:
    """Chat's function; None for a tool that runs at Anthropic.  Raises ClientError 400 without a definition."""
    if tool.type not in CUSTOM_TYPES and tool.input_schema is None:
        if tool.type == "function":
            message = (
                f"{where}: this is a function as OpenAI has them; send its name, description and input_schema alone"
            )
            raise bad_request(message, param="tools")
        if tool.type.startswith(CLIENT_TOOL_PREFIXES):
            message = f"{where}: {tool.type} is known to Anthropic's models alone; send it with an input_schema"
            raise bad_request(message, param="tools")
        return None
    if not tool.name:
        raise bad_request(f"{where}.name: Field required", param="tools")
    if tool.input_schema is None:  # an empty schema would make the model invent arguments
        raise bad_request(f"{where}.input_schema: {MISSING_SCHEMA}", param="tools")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _convert_choice(choice: ToolChoice, names: set[str]) -> Fields:
    if choice.type in ("auto", "none"):
        return {"tool_choice": choice.type} if names else {}
    if choice.type == "any" and names:
        return {"tool_choice": "required"}
    if choice.type == "tool" and choice.name in names:
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    if choice.type not in ("any", "tool"):
        raise bad_request("tool_choice.type: must be auto, any, tool or none", param="tool_choice")
    missing = f"{choice.name!r} is none of the tools" if choice.type == "tool" else "there is no tool"
    message = f"tool_choice: {missing} that can be called here; tools that run at Anthropic don't run here"
    raise bad_request(message, param="tool_choice")


def call_id(tool_use_id: str) -> str:
    """Our form of tool_use ids, call_<24 hex digits>, by which sampled turns are stored; other ids are unchanged."""
    return f"call_{ours[1]}" if (ours := _OWN_TOOL_USE_ID.fullmatch(tool_use_id)) else tool_use_id
