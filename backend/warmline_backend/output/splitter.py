"""Marked text told apart as it comes: reasoning, content and calls."""

from typing import Any, Protocol

from warmline_backend.output.dialect import Dialect, scanners_of
from warmline_backend.output.emitter import Teller
from warmline_backend.output.events import Called, Part, Said
from warmline_backend.output.markers import Scanner
from warmline_backend.tool_parsers.lenient_json import Unreadable
from warmline_backend.tool_parsers.registry import Opening

Tools = list[dict[str, Any]] | None

TRIALS_MAX = 32  # so many times, reasoning is looked at for calls that end it
ENDS_HELD_MAX = 64  # so many end markers may stand in a call's text


class Splitter(Protocol):
    """Parts that come out are final.  Offsets of calls are characters of all that was fed."""

    @property
    def done(self) -> bool:
        """What follows is not wanted."""

    @property
    def thinking(self) -> bool:
        """What follows is reasoning."""

    @property
    def calling(self) -> bool:
        """What follows belongs to a call."""

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""

    def finish(self, natural: bool) -> list[Part]:
        """The rest.  `natural`: the model ended by itself, so what is open may be taken for closed."""


class MarkedSplitter:
    """For models that put markers around reasoning and around calls.

    `tools` None: nothing is a call.  `thinking`: the prompt has opened the reasoning.  `parallel`: more than one call
    may be told.  `formed`: once it has begun, content goes on to the answer's end, whatever it spells.
    """

    def __init__(
        self,
        dialect: Dialect,
        tools: Tools,
        *,
        thinking: bool = False,
        parallel: bool = True,
        formed: bool = False,
    ) -> None:
        self._format = dialect.calls if tools else None
        self._tools = tools if self._format else None
        self._dialect, self._scanners = dialect, scanners_of(dialect, self._format is not None)
        self._teller, self._formed = Teller(self._tools, parallel), formed
        self._buffer = ""  # what comes after all that was consumed
        self._offset = 0  # of the buffer
        self._held: list[str] = []  # of a call, or of what may be one
        self._opening: Opening | None = None  # of the call
        self._call_scanner = Scanner(())
        self._ends_held = 0  # end markers in `_held`, taken for text of the call
        self._trial: MarkedSplitter | None = None  # reads what may be calls amid the reasoning
        self._trial_calls: list[Called] = []
        self._trial_marker, self._trial_start, self._trials = "", 0, 0
        bare = self._format is not None and self._format.may_be_bare is not None
        self._step = self._begin if bare else self._say
        if thinking:
            self._step = self._think
            self._teller.begin_reasoning()

    @property
    def done(self) -> bool:
        return self._teller.done

    @property
    def thinking(self) -> bool:
        return self._step in (self._think, self._try)

    @property
    def calling(self) -> bool:
        return self._step in (self._call, self._try)

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        while not self._teller.done and self._step():
            pass
        return self._teller.taken()

    def finish(self, natural: bool) -> list[Part]:
        going_on = True
        while going_on and not self._teller.done:
            going_on = self._step() or self._finish_step(natural)
        self._teller.finish()
        return self._teller.taken()

    def _finish_step(self, natural: bool) -> bool:
        """Do away with what is open.  Whether there is yet more to read."""
        if self._step == self._call:
            self._held.append(self._take(len(self._buffer)))
            self._end_call("", cut=not natural)
            return bool(self._buffer)
        if self._step == self._try:
            self._finish_trial(natural)
            return bool(self._buffer)
        if self._step == self._think:
            self._teller.think(self._take(len(self._buffer)))
        else:
            self._teller.say(self._take(len(self._buffer)))
        return False

    # ---- states: each consumes up to the next marker, and says whether another may go on

    def _begin(self) -> bool:
        """The answer may be a call that nothing marks."""
        assert self._format and self._format.may_be_bare
        is_call = self._format.may_be_bare(self._buffer)
        if is_call is None:
            return False
        if is_call:
            self._begin_call(self._format)
        else:
            self._step = self._say
        return True

    def _say(self) -> bool:
        if self._formed and self._teller.said:
            self._teller.say(self._take(len(self._buffer)))
            return False
        safe, marker = self._scanners.content.find(self._buffer)
        self._teller.say(self._take(safe))
        if not marker:
            return False
        if self._formed and self._teller.said:
            return True
        self._take(len(marker))
        if marker == self._dialect.think_start:
            self._teller.begin_reasoning()
            self._step = self._think
        elif marker == self._dialect.think_end:
            self._end_reasoning()
        elif opening := self._scanners.openings.get(marker):
            self._begin_call(opening)
        elif marker not in self._dialect.noise and not self._teller.after_call:
            self._teller.say(marker)
        return True

    def _think(self) -> bool:
        safe, marker = self._scanners.thought.find(self._buffer)
        self._teller.think(self._take(safe))
        if not marker:
            return False
        if marker == self._dialect.think_end:
            self._take(len(marker))
            self._end_reasoning()
        elif marker == self._dialect.think_start:
            self._take(len(marker))
            if not self._teller.reasoning_is_empty:  # else the prompt has opened it already
                self._teller.think(marker)
        else:
            self._begin_trial(marker)
        return True

    def _begin_trial(self, marker: str) -> None:
        self._trials += 1
        self._trial_start, self._trial_calls, self._held = self._offset, [], []
        if self._trials > TRIALS_MAX:
            self._teller.think(self._take(len(marker)))
            return
        self._trial, self._step = MarkedSplitter(self._dialect, self._tools), self._try
        self._trial_marker = marker
        self._attempt(self._take(len(marker)))

    def _end_reasoning(self) -> None:
        self._teller.end_reasoning(self._offset)
        bare = self._format is not None and self._format.may_be_bare is not None and self._teller.silent
        self._step = self._begin if bare else self._say

    # ---- calls

    def _begin_call(self, opening: Opening) -> None:
        self._opening, self._held, self._ends_held = opening, [], 0
        self._call_scanner = self._scanners.calls[opening.start]
        self._step = self._call

    def _call(self) -> bool:
        safe, marker = self._call_scanner.find(self._buffer)
        self._held.append(self._take(safe))
        if not marker:
            return False
        assert self._opening
        if marker != self._opening.end:  # the next call's start
            self._step = self._say
            self._end_call("", cut=False)
            return True
        self._take(len(marker))
        if not self._end_call(marker, cut=False):
            self._held.append(marker)
            self._ends_held += 1
        return True

    def _end_call(self, marker: str, *, cut: bool) -> bool:
        """A call's text is there: tell what it says, or the text itself where it says nothing.  False where the marker
        stands amid a text of the call.
        """
        assert self._opening
        text = "".join(self._held)
        try:
            if cut and self._opening.end:
                raise Unreadable("it is cut")
            self._teller.tell(self._opening.read(text, cut), self._offset)
        except Unreadable as error:
            if marker and error.cut and self._ends_held < ENDS_HELD_MAX:
                return False
            self._give_up(text + marker)
        self._step = self._say
        return True

    def _give_up(self, text: str) -> None:
        """No call after all.  Where it holds end markers, what follows the first of them is read anew."""
        assert self._opening
        first = text.find(self._opening.end) + len(self._opening.end) if self._ends_held else len(text)
        self._teller.say(self._opening.start + text[:first])
        self._buffer = text[first:] + self._buffer
        self._offset -= len(text) - first

    # ---- what may be calls amid the reasoning: they count where nothing but the end follows them

    def _try(self) -> bool:
        assert self._trial
        safe, marker = self._scanners.reasoned.find(self._buffer)
        if not self._attempt(self._take(safe)) or marker:
            self._end_trial()
            return True
        return False

    def _end_trial(self) -> None:
        """It is reasoning; other calls may begin within it."""
        text, length = "".join(self._held), len(self._trial_marker)
        self._teller.think(text[:length])
        self._buffer = text[length:] + self._buffer
        self._offset -= len(text) - length
        self._step = self._think

    def _attempt(self, text: str) -> bool:
        """Whether it may still be nothing but calls."""
        assert self._trial
        self._held.append(text)
        return self._all_calls(self._trial.feed(text))

    def _all_calls(self, parts: list[Part]) -> bool:
        self._trial_calls += [part for part in parts if isinstance(part, Called)]
        return not any(isinstance(part, Said) and part.text.strip() for part in parts)

    def _finish_trial(self, natural: bool) -> None:
        assert self._trial
        fits = self._attempt(self._take(len(self._buffer)))
        if not (fits and natural and self._all_calls(self._trial.finish(natural)) and self._trial_calls):
            self._end_trial()
            return
        self._teller.end_reasoning(self._trial_start)
        for call in self._trial_calls:
            if not self._teller.done:
                start = self._trial_start
                self._teller.call(Called(call.name, call.arguments, start, start + call.end))

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._offset += length
        return taken
