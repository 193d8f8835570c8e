"""Response of OpenAI's Responses API: chat's chunks in, events out, and the object that they describe.  Pure.

The same events make a stream and the JSON response:

    response.created  ->  items, each: added  ->  parts and deltas  ->  done  ->  response.completed or .incomplete

A stream with a long prefill has keepalives, which say how far it is, after the beginning.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from warmline_common.protocol.messages import ErrorBody
from warmline_proxy.api.base import ResponseStart
from warmline_proxy.api.chunks import ChatChunk, ChunkToolCall, ChunkUsage
from warmline_proxy.api.custom_tools import JsonObject, decode_input
from warmline_proxy.api.responses.history import RESPONSE_PREFIX, AnsweredRequest, Item, normalize_input
from warmline_proxy.api.responses.items import encode_reasoning, item_id
from warmline_proxy.api.responses.tools import Toolbox
from warmline_proxy.errors import ClientError, decode_error_body, rename_error_param

Events = Iterator[JsonObject]

MESSAGE, REASONING, FUNCTION_CALL, CUSTOM_CALL = "message", "reasoning", "function_call", "custom_tool_call"
PREFIXES = {MESSAGE: "msg", REASONING: "rs", FUNCTION_CALL: "fc", CUSTOM_CALL: "ctc"}
SERVER_ERROR, CANCELLED = "server_error", "cancelled"  # codes of errors
# Names in a backend's refusal, and the client's names of the same fields.
_FIELD_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
}


@dataclass(frozen=True)
class ResponseOptions:
    """Options of the request that the response depends on."""

    echo: JsonObject  # fields of the request that are repeated
    toolbox: Toolbox = field(default_factory=Toolbox)
    summary: bool = False  # reasoning as a summary
    encrypted_reasoning: bool = False  # reasoning also in a form to send back
    logprobs: bool = False
    stored_input: list[Item] | None = None  # all items of the input; None where the response is not stored


@dataclass
class _OpenItem:
    """Item in progress."""

    index: int
    kind: str
    item: JsonObject  # as in the response; `_finish_item` completes it
    texts: list[str] = field(default_factory=list)  # of its text or arguments
    logprobs: list[JsonObject] = field(default_factory=list)
    call_index: int = -1  # chat's index of a call

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ResponseEvents:
    """EventSource of one response, with numbered events."""

    def __init__(self, options: ResponseOptions, response_start: ResponseStart, model: str) -> None:
        self._options, self._response_start = options, response_start
        self._head: JsonObject = {
            "id": f"{RESPONSE_PREFIX}{response_start.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._output: list[JsonObject] = []
        self._item: _OpenItem | None = None
        self._finish_reason = ""
        self._failed_format = ""  # why the answer couldn't be held to its format
        self._usage: ChunkUsage | None = None
        self._event_count = 0
        self._is_refused = False  # the response, by the store

    # ---- input

    def add_chunk(self, chunk: ChatChunk) -> Events:
        yield from self._emit_created()
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            if reasoning := choice.delta.reasoning_text:
                yield from self._ensure_item(REASONING)
                yield self._append_text(reasoning, self._reasoning_event_name("text.delta"), delta=reasoning)
            if text := choice.delta.content:
                yield from self._emit_text(text, (choice.logprobs or {}).get("content") or [])
            for call in choice.delta.tool_calls or ():
                yield from self._emit_tool_call(call)
            if choice.finish_reason:
                self._finish_reason, self._failed_format = choice.finish_reason, choice.failed_format
                yield from self._finish_item()

    def report_progress(self, progress: JsonObject) -> Events:
        """OpenAI's keepalive with more fields: its Node SDK refuses unknown types, its own repeat all tools."""
        yield from self._emit_created()
        yield self._make_event("keepalive", **progress)

    def resume(self, earlier: "ResponseEvents") -> None:
        """Go on after the events of another dispatch of the same request."""
        self._event_count = earlier._event_count
        self._head["created_at"] = earlier._head["created_at"]

    def end(self) -> Events:
        yield from self._emit_created()
        yield from self._finish_item()
        if self._status == "completed" and all(item["type"] == REASONING for item in self._output):
            yield from self._add_item(MESSAGE)  # an empty answer has an empty message
            yield from self._finish_item()
        self._store(self._status)
        yield self._make_event(f"response.{self._status}", response=self.build_result())

    def fail(self, error: ClientError) -> Events:
        body = translate_error(error)
        yield from self._emit_created()
        failure = {"error": {"code": body.code or SERVER_ERROR, "message": body.message}}
        if body.code != CANCELLED:
            self._store("failed", failure)
        yield self._make_event("response.failed", response=self.build_response("failed") | failure)

    def _store(self, status: str, failure: JsonObject | None = None) -> None:
        """Store the response; from then on its `store` says whether it is."""
        if (items := self._options.stored_input) is not None:
            response = self.build_response(status) | (failure or {})
            stored_input = normalize_input(items, self._response_start.request_id)
            self._is_refused = not self._response_start.on_result(AnsweredRequest(response, stored_input))

    def build_result(self) -> JsonObject:
        """The whole response, after `end`."""
        return self.build_response(self._status)

    def build_response(self, status: str) -> JsonObject:
        """The response so far, without the item in progress."""
        is_over = status in ("completed", "incomplete")
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "error": None,
            "incomplete_details": self._build_incomplete_details() if status == "incomplete" else None,
            **self._options.echo,
            **({"store": False} if self._is_refused else {}),
            "output": list(self._output),
            "usage": self._build_usage() if is_over else None,
        }

    def _build_incomplete_details(self) -> JsonObject:
        failed = {"message": self._failed_format} if self._failed_format else {}  # a field of Warmline's own
        return {"reason": "max_output_tokens", **failed}

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    # ---- items

    def _emit_created(self) -> Events:
        if not self._event_count:
            for name in ("created", "in_progress"):
                yield self._make_event(f"response.{name}", response=self.build_response("in_progress"))

    def _ensure_item(self, kind: str) -> Events:
        if self._item is None or self._item.kind != kind:
            yield from self._finish_item()
            yield from self._add_item(kind)

    def _emit_text(self, text: str, logprobs: list[JsonObject]) -> Events:
        yield from self._ensure_item(MESSAGE)
        assert self._item is not None
        shown_logprobs = logprobs if self._options.logprobs else []
        self._item.logprobs += shown_logprobs
        yield self._append_text(text, "output_text.delta", content_index=0, delta=text, logprobs=shown_logprobs)

    def _emit_tool_call(self, call: ChunkToolCall) -> Events:
        if self._item is None or self._item.call_index != call.index:
            yield from self._finish_item()
            yield from self._add_tool_call(call)
        assert self._item is not None
        if arguments := call.function.arguments:
            if self._item.kind == CUSTOM_CALL:  # its input is known only with all arguments
                self._item.texts.append(arguments)
            else:
                yield self._append_text(arguments, "function_call_arguments.delta", delta=arguments)

    def _add_item(self, kind: str) -> Events:
        item: JsonObject = {"type": kind, "status": "in_progress"}
        if kind == MESSAGE:
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": []} if self._options.summary else {"summary": [], "content": []}
        yield self._open_item(kind, item)
        if kind == MESSAGE:
            part = {"type": "output_text", "annotations": [], "text": "", "logprobs": []}
            yield self._item_event("content_part.added", content_index=0, part=part)
        else:
            yield self._item_event(self._reasoning_event_name("part.added"), part=self._reasoning_text(""))

    def _add_tool_call(self, call: ChunkToolCall) -> Events:
        tool = self._options.toolbox.resolve(call.function.name or "")
        kind = CUSTOM_CALL if tool.kind == "custom" else FUNCTION_CALL
        item = {"type": kind, "status": "in_progress", "call_id": call.id or "", "name": tool.name}
        if tool.namespace:
            item["namespace"] = tool.namespace
        yield self._open_item(kind, {**item, "input" if kind == CUSTOM_CALL else "arguments": ""})
        assert self._item is not None
        self._item.call_index = call.index

    def _open_item(self, kind: str, item: JsonObject) -> JsonObject:
        index = len(self._output)
        item = {"id": item_id(PREFIXES[kind], self._response_start.request_id, index), **item}
        self._item = _OpenItem(index, kind, item)
        return self._make_event("response.output_item.added", output_index=index, item=item)

    def _finish_item(self) -> Events:
        """Complete the item in progress, if any."""
        if self._item is None:
            return
        finishers = {MESSAGE: self._finish_message, REASONING: self._finish_reasoning}
        yield from finishers.get(self._item.kind, self._finish_tool_call)(self._item)
        done, self._item = self._item, None
        done.item["status"] = "completed" if done.call_index >= 0 else self._status  # the backend sends whole calls
        self._output.append(done.item)
        yield self._make_event("response.output_item.done", output_index=done.index, item=done.item)

    def _finish_message(self, open_item: _OpenItem) -> Events:
        fields = {"text": open_item.text, "logprobs": list(open_item.logprobs)}
        part = {"type": "output_text", "annotations": [], **fields}
        yield self._item_event("output_text.done", content_index=0, **fields)
        yield self._item_event("content_part.done", content_index=0, part=part)
        open_item.item["content"] = [part]

    def _finish_reasoning(self, open_item: _OpenItem) -> Events:
        text = open_item.text
        yield self._item_event(self._reasoning_event_name("text.done"), text=text)
        yield self._item_event(self._reasoning_event_name("part.done"), part=self._reasoning_text(text))
        open_item.item["summary" if self._options.summary else "content"] = [self._reasoning_text(text)]
        if self._options.encrypted_reasoning:
            open_item.item["encrypted_content"] = encode_reasoning(text)

    def _finish_tool_call(self, open_item: _OpenItem) -> Events:
        text = open_item.text
        if open_item.kind == CUSTOM_CALL:
            text = decode_input(text)
            yield self._item_event("custom_tool_call_input.delta", delta=text)
            yield self._item_event("custom_tool_call_input.done", input=text)
            open_item.item["input"] = text
        else:
            yield self._item_event("function_call_arguments.done", name=open_item.item["name"], arguments=text)
            open_item.item["arguments"] = text

    # ---- parts

    def _reasoning_text(self, text: str) -> JsonObject:
        return {"type": "summary_text" if self._options.summary else "reasoning_text", "text": text}

    def _reasoning_event_name(self, what: str) -> str:
        """The event's name: "part.added", "text.delta", "text.done" or "part.done"."""
        if self._options.summary:
            return f"reasoning_summary_{what}"
        return f"reasoning_{what}" if what.startswith("text") else f"content_{what}"

    # ---- events

    def _append_text(self, text: str, name: str, /, **fields: Any) -> JsonObject:
        assert self._item is not None
        self._item.texts.append(text)
        return self._item_event(name, **fields)

    def _item_event(self, name: str, /, **fields: Any) -> JsonObject:
        assert self._item is not None
        if self._item.kind == REASONING:
            fields["summary_index" if self._options.summary else "content_index"] = 0
        place = {"item_id": self._item.item["id"], "output_index": self._item.index}
        return self._make_event(f"response.{name}", **place, **fields)

    def _make_event(self, name: str, /, **fields: Any) -> JsonObject:
        self._event_count += 1
        return {"type": name, "sequence_number": self._event_count - 1, **fields}

    def _build_usage(self) -> JsonObject:
        usage = self._usage or ChunkUsage(prompt_tokens=self._response_start.prompt_tokens)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def translate_error(error: ClientError) -> ErrorBody:
    """The error with the client's names of fields."""
    return rename_error_param(decode_error_body(error), _FIELD_NAMES)
