"""An answer of OpenAI's Responses, as it grows: chat's chunks in, events out, and the object that they describe.  Pure.

One machine makes both a stream and the one JSON, so they say the same:

    response.created  ->  items, each: added  ->  parts and deltas  ->  done  ->  response.completed or .incomplete
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from warmline_proxy.api.base import Begun
from warmline_proxy.api.chunks import Heard, HeardCall, HeardUsage
from warmline_proxy.api.responses.items import item_id, seal
from warmline_proxy.api.responses.tools import Object, Toolbox, input_of

Events = Iterator[Object]

MESSAGE, REASONING, CALL, CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc", CUSTOM: "ctc"}


@dataclass(frozen=True)
class Asked:
    """What the answer needs of its request."""

    echo: Object  # fields that are said again
    toolbox: Toolbox = field(default_factory=Toolbox)
    summary: bool = False  # reasoning is wanted as a summary, where clients look for it
    sealed: bool = False  # reasoning is wanted in a form to send back
    logprobs: bool = False


@dataclass
class _Item:
    """The item that is being written."""

    index: int
    kind: str
    item: Object  # as in the answer; `_finish` completes it
    texts: list[str] = field(default_factory=list)  # its text, or its arguments
    logprobs: list[Object] = field(default_factory=list)
    call: int = -1  # chat's index of a call

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Answering:
    """One answer.  `chunk` for each of the backend's, then `end`; or `fail`.  Events carry their number."""

    def __init__(self, asked: Asked, begun: Begun, model: str) -> None:
        self._asked, self._begun = asked, begun
        self._head: Object = {
            "id": f"resp_{begun.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._output: list[Object] = []
        self._open: _Item | None = None
        self._finish_reason = ""
        self._usage: HeardUsage | None = None
        self._events = 0  # told so far

    # ---- what comes

    def chunk(self, heard: Heard) -> Events:
        yield from self._begin()
        self._usage = heard.usage or self._usage
        for choice in heard.choices:
            if thought := choice.delta.thought:
                yield from self._reasoned(thought)
            if text := choice.delta.content:
                yield from self._said(text, (choice.logprobs or {}).get("content") or [])
            for call in choice.delta.tool_calls or ():
                yield from self._called(call)
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason
                yield from self._finish()

    def end(self) -> Events:
        """Once all chunks are in."""
        yield from self._begin()
        yield from self._finish()
        if not self._is_cut and not any(item["type"] != REASONING for item in self._output):
            yield from self._add(MESSAGE)  # an answer without a word is one, too
            yield from self._finish()
        yield self._event(f"response.{self._status}", response=self.response(self._status))

    def fail(self, code: str, message: str) -> Events:
        """Nothing may follow."""
        yield from self._begin()
        failed = {**self.response("failed"), "error": {"code": code, "message": message}}
        yield self._event("response.failed", response=failed)

    def result(self) -> Object:
        """The whole answer, after `end`."""
        return self.response(self._status)

    def response(self, status: str) -> Object:
        """The answer as it stands; an item that is being written is not in it."""
        over = status in ("completed", "incomplete")
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **self._asked.echo,
            "output": list(self._output),
            "usage": self._told_usage() if over else None,
        }

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason == "length"

    @property
    def _status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    # ---- items

    def _begin(self) -> Events:
        if not self._events:
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self.response("in_progress"))

    def _reasoned(self, text: str) -> Events:
        if self._open is None or self._open.kind != REASONING:
            yield from self._finish()
            yield from self._add(REASONING)
        yield self._written(text, self._reasoning_part("text.delta"), delta=text)

    def _said(self, text: str, logprobs: list[Object]) -> Events:
        if self._open is None or self._open.kind != MESSAGE:
            yield from self._finish()
            yield from self._add(MESSAGE)
        assert self._open is not None
        told = logprobs if self._asked.logprobs else []
        self._open.logprobs += told
        yield self._written(text, "output_text.delta", content_index=0, delta=text, logprobs=told)

    def _called(self, call: HeardCall) -> Events:
        if self._open is None or self._open.call != call.index:
            yield from self._finish()
            yield from self._add_call(call)
        assert self._open is not None
        if arguments := call.function.arguments:
            if self._open.kind == CUSTOM:  # its input can be told from the arguments only once they are whole
                self._open.texts.append(arguments)
            else:
                yield self._written(arguments, "function_call_arguments.delta", delta=arguments)

    def _add(self, kind: str) -> Events:
        item: Object = {"type": kind, "status": "in_progress"}
        if kind == MESSAGE:
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": []} if self._asked.summary else {"summary": [], "content": []}
        yield self._opened(kind, item)
        if kind == MESSAGE:
            yield self._of_item("content_part.added", content_index=0, part=self._message_part())
        else:
            yield self._of_item(self._reasoning_part("part.added"), part=self._reasoning_text(""))

    def _add_call(self, call: HeardCall) -> Events:
        tool = self._asked.toolbox.called(call.function.name or "")
        kind = CUSTOM if tool.kind == "custom" else CALL
        item = {"type": kind, "status": "in_progress", "call_id": call.id or "", "name": tool.name}
        if tool.namespace:
            item["namespace"] = tool.namespace
        yield self._opened(kind, {**item, "input" if kind == CUSTOM else "arguments": ""})
        assert self._open is not None
        self._open.call = call.index

    def _opened(self, kind: str, item: Object) -> Object:
        index = len(self._output)
        item = {"id": item_id(PREFIXES[kind], self._begun.request_id, index), **item}
        self._open = _Item(index, kind, item)
        return self._event("response.output_item.added", output_index=index, item=item)

    def _finish(self) -> Events:
        """Complete the item that is open, if one is."""
        if self._open is None:
            return
        yield from {MESSAGE: self._end_message, REASONING: self._end_reasoning}.get(self._open.kind, self._end_call)()
        done, self._open = self._open, None
        done.item["status"] = "completed" if done.call >= 0 else self._status  # calls are told only when they are whole
        self._output.append(done.item)
        yield self._event("response.output_item.done", output_index=done.index, item=done.item)

    def _end_message(self) -> Events:
        assert self._open is not None
        part = self._message_part()
        told = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._of_item("output_text.done", content_index=0, **told)
        yield self._of_item("content_part.done", content_index=0, part=part)
        self._open.item = {**self._open.item, "content": [part]}

    def _end_reasoning(self) -> Events:
        assert self._open is not None
        text = self._open.text
        yield self._of_item(self._reasoning_part("text.done"), text=text)
        yield self._of_item(self._reasoning_part("part.done"), part=self._reasoning_text(text))
        parts = {"summary" if self._asked.summary else "content": [self._reasoning_text(text)]}
        sealed = {"encrypted_content": seal(text)} if self._asked.sealed else {}
        self._open.item = {**self._open.item, **parts, **sealed}

    def _end_call(self) -> Events:
        assert self._open is not None
        text = self._open.text
        if self._open.kind == CUSTOM:
            text = input_of(text)
            yield self._of_item("custom_tool_call_input.delta", delta=text)
            yield self._of_item("custom_tool_call_input.done", input=text)
            self._open.item = {**self._open.item, "input": text}
        else:
            yield self._of_item("function_call_arguments.done", arguments=text)
            self._open.item = {**self._open.item, "arguments": text}

    # ---- parts

    def _message_part(self) -> Object:
        assert self._open is not None
        part: Object = {"type": "output_text", "annotations": [], "text": self._open.text}
        return {**part, "logprobs": list(self._open.logprobs)}

    def _reasoning_text(self, text: str) -> Object:
        return {"type": "summary_text" if self._asked.summary else "reasoning_text", "text": text}

    def _reasoning_part(self, what: str) -> str:
        """The event's name: "part.added", "text.delta", "text.done" or "part.done"."""
        if self._asked.summary:
            return f"reasoning_summary_{what}"
        return f"reasoning_{what}" if what.startswith("text") else f"content_{what}"

    # ---- events

    def _written(self, text: str, name: str, **fields: Any) -> Object:
        assert self._open is not None
        self._open.texts.append(text)
        return self._of_item(name, **fields)

    def _of_item(self, name: str, **fields: Any) -> Object:
        assert self._open is not None
        if self._open.kind == REASONING:
            fields["summary_index" if self._asked.summary else "content_index"] = 0
        place = {"item_id": self._open.item["id"], "output_index": self._open.index}
        return self._event(f"response.{name}", **place, **fields)

    def _event(self, name: str, **fields: Any) -> Object:
        self._events += 1
        return {"type": name, "sequence_number": self._events - 1, **fields}

    def _told_usage(self) -> Object:
        usage = self._usage or HeardUsage(prompt_tokens=self._begun.prompt_tokens)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
