"""A Messages body as OpenAI's chat body.  Pure.

system            a system message before all others; messages of the role system stay where they are
text              content, one string or several parts; the renderer joins them, so that both forms read the same.
                  What was said in several blocks doesn't run together: a line ends where a block does.  Not so in an
                  assistant's message, which is to read as it was sampled
thinking          reasoning_content; redacted_thinking has nothing to read and is left out
tool_use          tool_calls;  tool_result  a message of the role tool, in the place where it stands
cache_control     ignored, as every field that is not known: what can be reused is found by comparing tokens

Tools that run at Anthropic (web_search ...) are left out: nobody here could run them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import msgspec

from warmline_common.protocol.messages import decode
from warmline_proxy.api.anthropic.ids import call_id
from warmline_proxy.api.anthropic.tools import ToolChoice, ToolSpec, convert_tools
from warmline_proxy.api.base import PASSTHROUGH_FIELDS, Fields
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.body_fields import parse_object

ChatMessage = dict[str, Any]

ERROR_PREFIX = "Error: "  # before a failed tool's words, unless these say so themselves
NO_PLACEHOLDERS: Mapping[str, str] = MappingProxyType({})
# Instead of what tools have brought and the model can't read: they don't know, and the conversation is to go on.
PLACEHOLDERS = {
    "image": "[an image, which this model can't see]",
    "document": "[a document, which this model can't read]",
}


class ContentBlock(msgspec.Struct):
    """One content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None
    source: Any = None  # an object, or, of a search result, a string


class MessageParam(msgspec.Struct):
    role: str
    content: str | list[ContentBlock]


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class ThinkingConfig(msgspec.Struct, omit_defaults=True):
    type: str
    budget_tokens: int | None = None


class RequestMetadata(msgspec.Struct):
    user_id: str | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    """What of a body is looked into."""

    messages: list[MessageParam] | None = None
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[ContentBlock] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where output_config.format was before
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
        parsed = decode(body, MessagesBody)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:  # e.g. a lone surrogate
        raise bad_request(f"We could not parse the JSON body of your request: {error}") from None
    parsed.others = fields
    return parsed


def build_chat_fields(body: MessagesBody) -> Fields:
    """Raises ClientError 400."""
    messages = [*_convert_system(body.system), *_convert_messages(body.messages)]
    fields: Fields = {name: value for name, value in body.others.items() if name in PASSTHROUGH_FIELDS}
    fields["messages"] = messages
    if body.max_tokens is not None:
        fields["max_tokens"] = max(1, body.max_tokens) if body.max_tokens >= 0 else body.max_tokens
    if words := [word for word in body.stop_sequences or () if word]:
        fields["stop"] = words
    if messages[-1]["role"] == "assistant" and _is_continuation(messages[-1]):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return fields | convert_tools(body.tools or [], body.tool_choice) | _convert_thinking(body) | _convert_format(body)


def _type_error(message: str) -> ClientError:
    """msgspec says: Expected `str`, got `int` - at `$.messages[0].role`."""
    what, _, where = message.partition(" - at ")
    path = where.strip("`").removeprefix("$").replace("[", ".").replace("]", "").strip(".")
    return bad_request(f"{path}: {what}" if path else what, param=path or None)


def _convert_system(system: str | Sequence[ContentBlock] | None) -> Iterator[ChatMessage]:
    if content := _convert_content(system or "", "system"):
        yield {"role": "system", "content": content}


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
    return convert(message.content, f"{where}.content")


def _convert_user(blocks: Sequence[ContentBlock], where: str) -> Iterator[ChatMessage]:
    """What is said and what tools have answered, in their order; beside an answer, no words are no message."""
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
    """One message: what was thought, what was said and what was called."""
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
    arguments = msgspec.json.encode(block.input or {}).decode()
    return {"id": call_id(block.id), "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _convert_tool_result(block: ContentBlock, where: str) -> ChatMessage:
    if not block.tool_use_id:
        raise bad_request(f"{where}.tool_use_id: Field required", param="messages")
    content = _convert_content(block.content or "", f"{where}.content", PLACEHOLDERS)
    if block.is_error and "error" not in str(content)[:100].lower():
        content = ERROR_PREFIX + content if isinstance(content, str) else [_text_part(ERROR_PREFIX), *content]
    return {"role": "tool", "tool_call_id": call_id(block.tool_use_id), "content": content}


def _convert_content(
    content: str | Sequence[ContentBlock], where: str, placeholders: Mapping[str, str] = NO_PLACEHOLDERS
) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return _join_texts(
        _separate_texts([_read_text(block, f"{where}.{i}", placeholders) for i, block in enumerate(content)])
    )


def _separate_texts(texts: Sequence[str]) -> list[str]:
    """Each but the last ends a line, unless there is white space between it and the next one anyway."""
    nonempty = [text for text in texts if text]
    ends = ["" if one[-1].isspace() or other[0].isspace() else "\n" for one, other in pairwise(nonempty)]
    return [text + end for text, end in zip(nonempty, [*ends, ""], strict=True)] if nonempty else []


def _join_texts(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Texts that came in several blocks stay parts: what looks into prompts sees where one ends."""
    texts = [text for text in texts if text]
    return [_text_part(text) for text in texts] if len(texts) > 1 else "".join(texts)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _read_text(block: ContentBlock, where: str, placeholders: Mapping[str, str] = NO_PLACEHOLDERS) -> str:
    """Raises ClientError 400 for what is no text, and has none `instead`."""
    if block.type == "text":
        if block.text is None:
            raise bad_request(f"{where}.text: Field required", param="messages")
        return block.text
    if block.type == "document" and (plain := _read_plain_document(block.source)) is not None:
        return plain
    if block.type == "search_result":
        return "".join(_read_text(each, where) for each in block.content or () if isinstance(each, ContentBlock))
    if block.type == "tool_reference":
        return block.tool_name or ""
    if block.type in placeholders:
        return placeholders[block.type]
    kind = block.type[:40]
    raise bad_request(f'{where}: of type "{kind}"; the model served here reads only text', param="messages")


def _read_plain_document(source: Any) -> str | None:
    """A document's text, where it is one."""
    data = source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None
    return data if isinstance(data, str) else None


def _is_continuation(message: ChatMessage) -> bool:
    """Whether an assistant's message is an answer to go on with."""
    return bool(message["content"]) and "tool_calls" not in message


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
    if form is None:
        return {}
    if form.type != "json_schema" or form.schema is None:
        raise bad_request("output_config.format: must be of type json_schema, with a schema", param="output_config")
    schema = {"name": "answer", "schema": form.schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
