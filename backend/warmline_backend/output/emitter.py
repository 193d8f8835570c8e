"""What is told of an answer, in parts, and what is held until it is known whether it belongs to one."""

import json
from typing import Any

from warmline_backend.output.events import Called, Part, Said, Thought
from warmline_backend.tool_parsers.argument_types import parameters_of, typed
from warmline_backend.tool_parsers.base import Items, Written
from warmline_backend.tool_parsers.lenient_json import Unreadable


class Teller:
    """Line breaks next to reasoning's markers belong to the markers.  Where there may be calls, so does white space
    before and after them, but where content stands on both sides.

    Offsets are characters of all that the model wrote.  One an answer.
    """

    def __init__(self, tools: list[dict[str, Any]] | None, parallel: bool) -> None:
        self._tools, self._parallel = tools, parallel
        self._parts: list[Part] = []
        self._space = ""  # of content, told only once something follows
        self._breaks = ""  # of reasoning, likewise
        self._after_marker = False
        self._said = False
        self.called = False
        self.after_call = False  # and nothing was said since
        self.reasoned_until = 0  # where the last reasoning ended; -1 within one

    @property
    def done(self) -> bool:
        """The one call that was wanted is told."""
        return self.called and not self._parallel

    @property
    def said(self) -> bool:
        """There is content."""
        return self._said

    @property
    def silent(self) -> bool:
        """Nothing was told yet, but reasoning."""
        return not self._said and not self.called

    def taken(self) -> list[Part]:
        """What is new to tell."""
        parts, self._parts = self._parts, []
        return parts

    # ---- reasoning

    def begin_reasoning(self) -> None:
        self._after_marker, self.reasoned_until = True, -1

    @property
    def reasoning_is_empty(self) -> bool:
        return self._after_marker

    def end_reasoning(self, offset: int) -> None:
        self._after_marker, self._breaks, self.reasoned_until = True, "", offset

    def think(self, text: str) -> None:
        if not (text := self._unmarked(text)):
            return
        text = self._breaks + text
        told = text.rstrip("\n")
        self._breaks = text[len(told) :]
        if told:
            self._parts.append(Thought(told))

    def _unmarked(self, text: str) -> str:
        if self._after_marker:
            text = text.lstrip("\n")
            self._after_marker = not text
        return text

    # ---- content and calls

    def say(self, text: str) -> None:
        if not (text := self._unmarked(text)):
            return
        if self.called and not self._said:
            text = text.lstrip()
        if self._tools is None:
            self._said = True
            self._parts.append(Said(text))
            return
        text = self._space + text
        told = text.rstrip()
        self._space = text[len(told) :]
        if told:
            self._said, self.after_call = True, False
            self._parts.append(Said(told))

    def tell(self, items: Items, offset: int) -> None:
        """Calls that end at `offset`, and what stands between them.  Raises Unreadable, and nothing is told then."""
        for item in [item if isinstance(item, str) else self._called(item, offset) for item in items]:
            if isinstance(item, str):
                self.say(item)
            elif not self.done:
                self.call(item)

    def _called(self, written: Written, offset: int) -> Called:
        arguments = typed(written.arguments, parameters_of(self._tools, written.name))
        return Called(written.name, _as_json(arguments), self.reasoned_until, offset)

    def call(self, call: Called) -> None:
        if not self._said:
            self._space = ""
        self.called = self.after_call = True
        self._after_marker = False
        self._parts.append(call)

    def finish(self) -> None:
        """Nothing more comes: the white space at the end is told too, but behind calls."""
        if self._breaks:
            self._parts.append(Thought(self._breaks))
        if self._space and not self.called:
            self._parts.append(Said(self._space))
        self._breaks = self._space = ""


def _as_json(arguments: dict[str, Any]) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can say
        return json.dumps(arguments)
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error
    return text
