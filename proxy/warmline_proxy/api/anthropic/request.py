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
from warmline_proxy.api.anthropic.tools import ToolChoice, ToolSpec, tool_fields
from warmline_proxy.api.base import PASSED_ON, Fields
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.body_fields import object_of

ChatMessage = dict[str, Any]

RESULT_ERROR = "Error: "  # before a failed tool's words, unless these say so themselves
NOTHING: Mapping[str, str] = MappingProxyType({})
# Instead of what tools have brought and the model can't read: they don't know, and the conversation is to go on.
OMITTED = {"image": "[an image, which this model can't see]", "document": "[a document, which this model can't read]"}


class Block(msgspec.Struct):
    """One content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    source: Any = None  # an object, or, of a search result, a string


class MessageIn(msgspec.Struct):
    role: str
    content: str | list[Block]


class Format(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: Format | None = None


class Thinking(msgspec.Struct, omit_defaults=True):
    type: str
    budget_tokens: int | None = None


class Metadata(msgspec.Struct):
    user_id: str | None = None


class Body(msgspec.Struct, kw_only=True):
    """What of a body is looked into."""

    messages: list[MessageIn] | None = None
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # where output_config.format was before
    metadata: Metadata | None = None
    others: Mapping[str, msgspec.Raw] = {}  # all fields as they came, without nulls

    @property
    def user_id(self) -> str:
        return (self.metadata.user_id if self.metadata else None) or ""


def read_body(body: bytes) -> Body:
    """Raises ClientError 400."""
    fields = object_of(body)
    fields.pop("others", None)
    try:
        parsed = decode(body, Body)
    except msgspec.ValidationError as error:
        raise _mistyped(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:  # e.g. a lone surrogate
        raise bad_request(f"We could not parse the JSON body of your request: {error}") from None
    parsed.others = fields
    return parsed


def chat_fields(body: Body) -> Fields:
    """Raises ClientError 400."""
    messages = [*_system(body.system), *_messages(body.messages)]
    fields: Fields = {name: value for name, value in body.others.items() if name in PASSED_ON}
    fields["messages"] = messages
    if body.max_tokens is not None:
        fields["max_tokens"] = max(1, body.max_tokens) if body.max_tokens >= 0 else body.max_tokens
    if words := [word for word in body.stop_sequences or () if word]:
        fields["stop"] = words
    if messages[-1]["role"] == "assistant" and _is_begun(messages[-1]):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return fields | tool_fields(body.tools or [], body.tool_choice) | _thinking(body) | _format(body)


def _mistyped(message: str) -> ClientError:
    """msgspec says: Expected `str`, got `int` - at `$.messages[0].role`."""
    what, _, where = message.partition(" - at ")
    path = where.strip("`").removeprefix("$").replace("[", ".").replace("]", "").strip(".")
    return bad_request(f"{path}: {what}" if path else what, param=path or None)


def _system(system: str | Sequence[Block] | None) -> Iterator[ChatMessage]:
    if content := _content(system or "", "system"):
        yield {"role": "system", "content": content}


def _messages(messages: Sequence[MessageIn] | None) -> list[ChatMessage]:
    if not messages:
        raise bad_request("messages: at least one message is required", param="messages")
    return [read for i, message in enumerate(messages) for read in _message(message, f"messages.{i}")]


def _message(message: MessageIn, where: str) -> Iterator[ChatMessage]:
    if message.role == "system":
        return iter([{"role": "system", "content": _content(message.content, f"{where}.content")}])
    if message.role not in ("user", "assistant"):
        raise bad_request(f"{where}.role: must be user, assistant or system", param="messages")
    if isinstance(message.content, str):
        return iter([{"role": message.role, "content": message.content}])
    read = _user if message.role == "user" else _assistant
    return read(message.content, f"{where}.content")


def _user(blocks: Sequence[Block], where: str) -> Iterator[ChatMessage]:
    """What is said and what tools have answered, in their order; beside an answer, no words are no message."""
    said, answered = list[str](), False
    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            said.append(_text(block, f"{where}.{i}"))
            continue
        if any(said):
            yield {"role": "user", "content": _joined(_apart(said))}
        said, answered = [], True
        yield _tool_result(block, f"{where}.{i}")
    if any(said) or not answered:
        yield {"role": "user", "content": _joined(_apart(said))}


def _assistant(blocks: Sequence[Block], where: str) -> Iterator[ChatMessage]:
    """One message: what was thought, what was said and what was called."""
    thought, said, calls = "", list[str](), list[dict[str, Any]]()
    for i, block in enumerate(blocks):
        if block.type == "thinking":
            thought += block.thinking or ""
        elif block.type == "tool_use":
            calls.append(_tool_call(block, f"{where}.{i}"))
        elif block.type != "redacted_thinking":
            said.append(_text(block, f"{where}.{i}"))
    message: ChatMessage = {"role": "assistant", "content": _joined(said)}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    yield message


def _tool_call(block: Block, where: str) -> dict[str, Any]:
    if not block.id or not block.name:
        raise bad_request(f"{where}: a tool_use needs an id and a name", param="messages")
    arguments = msgspec.json.encode(block.input or {}).decode()
    return {"id": call_id(block.id), "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool_result(block: Block, where: str) -> ChatMessage:
    if not block.tool_use_id:
        raise bad_request(f"{where}.tool_use_id: Field required", param="messages")
    content = _content(block.content or "", f"{where}.content", OMITTED)
    if block.is_error and "error" not in str(content)[:100].lower():
        content = RESULT_ERROR + content if isinstance(content, str) else [_part(RESULT_ERROR), *content]
    return {"role": "tool", "tool_call_id": call_id(block.tool_use_id), "content": content}


def _content(
    content: str | Sequence[Block], where: str, instead: Mapping[str, str] = NOTHING
) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return _joined(_apart([_text(block, f"{where}.{i}", instead) for i, block in enumerate(content)]))


def _apart(texts: Sequence[str]) -> list[str]:
    """Each but the last ends a line, unless there is white space between it and the next one anyway."""
    full = [text for text in texts if text]
    ends = ["" if one[-1].isspace() or other[0].isspace() else "\n" for one, other in pairwise(full)]
    return [text + end for text, end in zip(full, [*ends, ""], strict=True)] if full else []


def _joined(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Texts that came in several blocks stay parts: what looks into prompts sees where one ends."""
    texts = [text for text in texts if text]
    return [_part(text) for text in texts] if len(texts) > 1 else "".join(texts)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text(block: Block, where: str, instead: Mapping[str, str] = NOTHING) -> str:
    """Raises ClientError 400 for what is no text, and has none `instead`."""
    if block.type == "text":
        if block.text is None:
            raise bad_request(f"{where}.text: Field required", param="messages")
        return block.text
    if block.type == "document" and (plain := _plain(block.source)) is not None:
        return plain
    if block.type == "search_result":
        return "".join(_text(each, where) for each in block.content or () if isinstance(each, Block))
    if block.type == "tool_reference":
        return block.tool_name or ""
    if block.type in instead:
        return instead[block.type]
    kind = block.type[:40]
    raise bad_request(f'{where}: of type "{kind}"; the model served here reads only text', param="messages")


def _plain(source: Any) -> str | None:
    """A document's text, where it is one."""
    data = source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None
    return data if isinstance(data, str) else None


def _is_begun(message: ChatMessage) -> bool:
    """Whether an assistant's message is an answer to go on with."""
    return bool(message["content"]) and "tool_calls" not in message


def _thinking(body: Body) -> Fields:
    fields: Fields = {}
    if body.thinking:
        fields["thinking"] = msgspec.to_builtins(body.thinking)
    effort = body.output_config.effort if body.output_config else None
    if effort and not (body.thinking and body.thinking.type == "disabled"):
        fields["reasoning_effort"] = effort
    return fields


def _format(body: Body) -> Fields:
    form = (body.output_config.format if body.output_config else None) or body.output_format
    if form is None:
        return {}
    if form.type != "json_schema" or form.schema is None:
        raise bad_request("output_config.format: must be of type json_schema, with a schema", param="output_config")
    schema = {"name": "answer", "schema": form.schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
