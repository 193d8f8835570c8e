"""Answers that called tools put back as they were sampled, in place of how the template writes them anew.

A client sends calls back parsed: their spaces, order and escapes are not the model's any more.  Where what was sampled
still reads as what the client sends, its tokens stand in the prompt, so that a prompt begins as the last one went on.

The conversation is rendered with words of ours, which nobody could guess, for such a message's content and the names of
its calls.  Where they come out is where the tokens belong; where that is not clear the message stays as it is rendered.
"""

import json
import re
import secrets
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import xxhash
from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.prompt.messages import Conversation
from warmline_backend.prompt.template_compat import Item, Said
from warmline_backend.tool_parsers.registry import ToolFormat, tool_format
from warmline_common.protocol.messages import SampledTurn
from warmline_common.protocol.tokens import pack_tokens, unpack_tokens

Tools = list[dict[str, Any]] | None
Read = tuple[str, list[tuple[str, str]]]  # content, and the calls' names and arguments as JSON
ReadTurn = Callable[[Sequence[int], Tools], Read]  # tokens as an answer of a model that was told of these tools
Tokenized = tuple[list[int], Callable[[int], int]]  # ids, and how many of them lie wholly before a character

SHAPES_MAX = 1024
READ_MAX = 4096  # turns that were read, remembered,
READ_BYTES_MAX = 1 << 26  # and what they and their tokens may weigh
HEAD_TOKENS = 16  # as many as the header of an assistant's message may have

_UNREADABLE = (ValueError, LookupError, TypeError, RecursionError, OverflowError)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens for the characters [start, end) of a marked text."""

    message: int  # its index
    start: int
    end: int
    tokens: list[int]


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation with words of ours in messages that may be replayed."""

    conversation: Conversation
    pattern: re.Pattern[str]  # finds the words: kind ("c" or "n"), message, call
    turns: dict[int, list[int]]  # the tokens, by the message's index


class Replayer:
    """Any number of threads."""

    def __init__(self, tokenizer: TokenizerWrapper, read_turn: ReadTurn) -> None:
        self._wrapper, self._read_turn = tokenizer, read_turn
        self._format: ToolFormat | None = tool_format(tokenizer)
        self._think_end = str(tokenizer.think_end or "")
        self._ends = [str(tokenizer.decode([token])) for token in sorted(tokenizer.eos_token_ids)]
        self._any_end = re.compile("|".join(map(re.escape, filter(None, self._ends))) or r"\Z")
        self._shapes: set[str] = set()  # of regions that read as they should
        self._remembered: OrderedDict[bytes, Read | None] = OrderedDict()
        self._remembered_bytes = 0
        self._lock = threading.Lock()

    # ---- which

    def marked(self, conversation: Conversation, turns: Iterable[SampledTurn]) -> Marked:
        """With every message marked whose turn is among these and still says the same."""
        by_ids = {tuple(turn.calls): turn.tokens for turn in turns}
        tools_key = xxhash.xxh3_128_digest(json.dumps(conversation.offered).encode()) if by_ids else b""
        faithful = {}
        for index, item in enumerate(conversation.closed):
            sampled = by_ids.get(item.said.ids) if item.said.ids else None
            tokens = self._without_end(unpack_tokens(sampled)) if sampled and _is_whole(item) else []
            if tokens and self._says(tokens, item.said, conversation.offered, tools_key):
                faithful[index] = tokens
        return self._mark(conversation, faithful)

    def without(self, marked: Marked, original: Conversation, doubtful: set[int]) -> Marked:
        """Fewer messages marked."""
        return self._mark(original, {at: tokens for at, tokens in marked.turns.items() if at not in doubtful})

    def _without_end(self, tokens: list[int]) -> list[int]:
        """The template writes the end of the answer."""
        return tokens[:-1] if tokens and tokens[-1] in self._wrapper.eos_token_ids else tokens

    def _says(self, sampled: list[int], said: Said, tools: Tools, tools_key: bytes) -> bool:
        if (read := self._read(sampled, tools, tools_key)) is None:
            return False
        content, calls = read
        if content.strip() != self._spoken(said.content).strip() or [name for name, _ in calls] != list(said.names):
            return False
        return all(_same(_value(text), given) for (_, text), given in zip(calls, said.arguments, strict=True))

    def _spoken(self, content: str) -> str:
        """Some clients send the reasoning before the content."""
        return content.rpartition(self._think_end)[2] if self._think_end else content

    def _read(self, sampled: list[int], tools: Tools, tools_key: bytes) -> Read | None:
        key = tools_key + pack_tokens(sampled)
        with self._lock:
            if key in self._remembered:
                self._remembered.move_to_end(key)
                return self._remembered[key]
        try:
            read = self._read_turn(sampled, tools)
        except _UNREADABLE:  # tokens of another tokenizer
            read = None
        self._remember(key, read)
        return read

    def _remember(self, key: bytes, read: Read | None) -> None:
        with self._lock:
            if key in self._remembered:  # by another thread meanwhile
                return
            self._remembered[key] = read
            self._remembered_bytes += _weight(key, read)
            while len(self._remembered) > READ_MAX or self._remembered_bytes > READ_BYTES_MAX:
                self._remembered_bytes -= _weight(*self._remembered.popitem(last=False))

    # ---- where

    def _mark(self, conversation: Conversation, turns: dict[int, list[int]]) -> Marked:
        word = f"w{secrets.token_hex(8)}"
        items = [
            self._marked_item(item, at, word) if at in turns else item for at, item in enumerate(conversation.items)
        ]
        return Marked(
            conversation=msgspec.structs.replace(conversation, items=items) if turns else conversation,
            pattern=re.compile(word + r"([cn])(\d+)z(\d+)q"),
            turns=turns,
        )

    def _marked_item(self, item: Item, at: int, word: str) -> Item:
        content, calls = item.message["content"], []
        spoken = self._spoken(content)
        content = content[: len(content) - len(spoken)] + (f"{word}c{at}z0q" if spoken.strip() else spoken)
        for number, call in enumerate(item.message.get("tool_calls", ())):
            function, name = call["function"], f"{word}n{at}z{number}q"
            nothing = "{}" if isinstance(function["arguments"], str) else {}
            marked = {**call, "function": {**function, "name": name, "arguments": nothing}}
            if str(call.get("id", "")).startswith(shown := f"functions.{function['name']}:"):
                marked["id"] = f"functions.{name}:{call['id'][len(shown) :]}"
            calls.append(marked)
        return item.changed(content=content, **({"tool_calls": calls} if calls else {}))

    def places(self, marked: Marked, text: str, tail: str) -> tuple[list[Place], set[int]]:
        """Where in the rendered text the turns belong, in their order, and the messages of which that is not clear.

        `tail`: the prompt's end, from where the last message ends: what answers are begun with.
        """
        found: dict[int, list[re.Match[str]]] = {}
        for match in marked.pattern.finditer(text):
            found.setdefault(int(match[2]), []).append(match)
        places: list[Place] = []
        doubtful: set[int] = set()
        for at, tokens in sorted(marked.turns.items()):
            after = places[-1].end if places else 0
            calls = len(marked.conversation.items[at].message.get("tool_calls", ()))
            words = _words(found.get(at, []), calls)
            place = self._place(text, after, words, tail, tokens) if words else None
            if place is None or not self._reads(text[place.start : place.end], words, marked):
                doubtful.add(at)
            else:
                places.append(place)
        return places, doubtful

    def _place(self, text: str, after: int, words: list[re.Match[str]], tail: str, tokens: list[int]) -> Place | None:
        at, first, last = int(words[0][2]), words[0], words[-1]
        end = self._end(text, last)
        begins = first.start() if first[1] == "c" else self._call_start(text, after, first.start(), tail)
        if end is None or begins is None or begins < after:
            return None
        header, _, _ = tail.partition(str(self._wrapper.think_start)) if self._think_end else (tail, "", "")
        head = self._decoded(tokens[:HEAD_TOKENS])
        if (own := header.strip()) and head.startswith(own) and text.endswith(own, after, begins):
            return Place(message=at, start=begins - len(own), end=end, tokens=tokens)  # it began a message of its own
        start, thought = self._start(text, after, begins, header, tail)
        return Place(message=at, start=start, end=end, tokens=tokens if thought else self._unspaced(tokens))

    def _start(self, text: str, after: int, begins: int, header: str, tail: str) -> tuple[int, bool]:
        """Where what was sampled after the reasoning began, and whether the space that it began with belongs there."""
        bare = after + len(text[after:begins].rstrip())
        if self._think_end and text.endswith(self._think_end, after, bare):
            # A template that closed the reasoning itself went on with a space before the model did.
            own, thought = tail if tail.rstrip().endswith(self._think_end) else "", True
        else:
            own, thought = header, not self._think_end
        space = own[len(own.rstrip()) :]
        fits = text.startswith(space, bare) and bare + len(space) <= begins
        return bare + len(space) if fits else begins, thought

    def _unspaced(self, tokens: list[int]) -> list[int]:
        """Without the space between a reasoning that is not there and the answer."""
        at = next((at for at, token in enumerate(tokens) if self._decoded([token]).strip()), 0)
        return tokens[at:]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._wrapper.decode(tokens))

    def _call_start(self, text: str, after: int, name: int, tail: str) -> int | None:
        at = text.rfind(self._format.start, after, name) if self._format and self._format.start else -1
        if at >= 0:
            return at
        header = tail.partition(str(self._wrapper.think_start))[0] if self._think_end else tail
        at = text.rfind(header, after, name) if header else -1
        return at + len(header) if at >= 0 else None

    def _end(self, text: str, last: re.Match[str]) -> int | None:
        if last[1] == "c":
            return last.end()
        over = match.start() if (match := self._any_end.search(text, last.end())) else None
        if (marker := self._format.end if self._format else "") and marker not in self._ends:
            at = text.find(marker, last.end(), over)
            return at + len(marker) if at >= 0 else over
        return over

    def _reads(self, region: str, words: list[re.Match[str]], marked: Marked) -> bool:
        """Whether the region is these words' message, the whole of it, and nothing else."""
        if {match[0] for match in marked.pattern.finditer(region)} != {match[0] for match in words}:
            return False
        names = [match[0] for match in words if match[1] == "n"]
        if not names:
            return region == words[0][0]
        shape = marked.pattern.sub(lambda match: f"{match[1]}{match[3]}", region)
        if shape in self._shapes:
            return True
        tokens = self._wrapper.encode(region, add_special_tokens=False)
        try:
            content, calls = self._read_turn(tokens, marked.conversation.offered)
        except _UNREADABLE:
            return False
        expected = words[0][0] if words[0][1] == "c" else ""
        reads = content.strip() == expected and [name for name, _ in calls] == names
        if reads and len(self._shapes) < SHAPES_MAX:
            self._shapes.add(shape)
        return reads


def _weight(key: bytes, read: Read | None) -> int:
    content, calls = read or ("", [])
    return len(key) + len(content) + sum(len(name) + len(arguments) for name, arguments in calls)


def _is_whole(item: Item) -> bool:
    """Its content is where the client had it."""
    return "tool_calls" not in item.message or bool(item.message["content"]) == bool(item.said.content)


def _words(found: list[re.Match[str]], calls: int) -> list[re.Match[str]]:
    """The content's word, if the template shows it, and the first of each call's; [] where they are not in order."""
    content = [match for match in found if match[1] == "c"]
    names: dict[int, re.Match[str]] = {}
    for match in found:
        if match[1] == "n":
            names.setdefault(int(match[3]), match)
    words = [*content, *names.values()]
    in_order = all(a.end() <= b.start() for a, b in pairwise(words))
    return words if in_order and len(content) <= 1 and list(names) == list(range(calls)) else []


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _same(a: Any, b: Any) -> bool:
    """As JSON: a number is its value, true is no number, and an object has no order."""
    try:
        return _equal(a, b)
    except RecursionError:
        return False


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


# ---- the prompt


def spliced(
    text: str,
    places: list[Place],
    marked: Marked,
    tokenize: Callable[[str], Tokenized],
) -> Tokenized:
    """The text's tokens, with each place's in its stead.  Characters are those of the marked text."""
    ids: list[int] = []
    starts: list[int] = []  # characters at which the parts below begin
    parts: list[Callable[[int], int]] = []

    def add_text(start: int, end: int) -> None:
        piece = _Restored(text[start:end], marked.pattern, lambda match: _meant(marked, match))
        tokens, token_at = tokenize(piece.text) if piece.text else ([], lambda _: 0)
        base = len(ids)
        starts.append(start)
        parts.append(lambda offset: base + token_at(piece.offset(offset - start)))
        ids.extend(tokens)

    at = 0
    for place in places:
        add_text(at, place.start)
        base = len(ids)
        starts.append(place.start)
        parts.append(lambda _, base=base: base)  # type: ignore[misc]
        ids.extend(place.tokens)
        at = place.end
    add_text(at, len(text))
    return ids, lambda offset: parts[bisect_right(starts, offset) - 1](offset)


def _meant(marked: Marked, word: re.Match[str]) -> str:
    """What a word stands for, where a template says it outside of its message."""
    said = marked.conversation.items[int(word[2])].said
    return said.names[int(word[3])] if word[1] == "n" else said.content


class _Restored:
    """A piece of text in which names stand again, and where its characters have gone."""

    def __init__(self, marked: str, pattern: re.Pattern[str], name: Callable[[re.Match[str]], str]) -> None:
        self._edges, self._shifts = [0], [0]
        pieces, at, shift = [], 0, 0
        for match in pattern.finditer(marked):
            told = name(match)
            pieces += [marked[at : match.start()], told]
            at = match.end()
            shift += len(told) - (match.end() - match.start())
            self._edges.append(at)
            self._shifts.append(shift)
        self.text = "".join([*pieces, marked[at:]]) if pieces else marked

    def offset(self, offset: int) -> int:
        return max(0, offset + self._shifts[bisect_right(self._edges, offset) - 1])
