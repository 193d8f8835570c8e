"""Replay of sampled answers with tool calls, in place of the template's rendering of them.

A client sends calls back parsed: their spaces, order and escapes are not the model's any more.  Where the sampled
tokens still parse to what the client sends, they stand in the prompt, so that a prompt begins as the last one went on.

The conversation is rendered with placeholders, random words, for such a message's content and the names of its calls.
They show the place of the tokens; where it is ambiguous the message stays as rendered.
"""

import json
import re
import secrets
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import xxhash
from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.prompt.messages import ChatConversation
from warmline_backend.prompt.template_compat import ConversationItem, OriginalMessage
from warmline_backend.tool_parsers.registry import ToolFormat, detect_tool_format
from warmline_common.protocol.messages import SampledTurn
from warmline_common.protocol.tokens import pack_tokens, unpack_tokens

Tools = list[dict[str, Any]] | None
ParsedTurn = tuple[str, list[tuple[str, str]]]  # content, and the calls' names and arguments as JSON
TurnParser = Callable[[Sequence[int], Tools], ParsedTurn]  # tokens of an answer, and the prompt's tools
TokenizedText = tuple[list[int], Callable[[int], int]]  # ids, and how many of them lie wholly before a character

SHAPES_MAX = 1024
PARSED_TURNS_MAX = 4096  # cached
PARSED_TURNS_BYTES_MAX = 1 << 26  # of them, with their tokens
HEADER_TOKENS_MAX = 16  # as many as the header of an assistant's message may have

_PARSE_ERRORS = (ValueError, LookupError, TypeError, RecursionError, OverflowError)


class SampledSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens for the characters [start, end) of a marked text."""

    message_index: int  # its index
    start: int
    end: int
    tokens: list[int]


class MarkedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation with placeholders in messages that may be replayed."""

    conversation: ChatConversation
    placeholder_pattern: re.Pattern[str]  # finds the words: kind ("c" or "n"), message, call
    sampled_tokens: dict[int, list[int]]  # the tokens, by the message's index


class ToolCallReplayer:
    """Replayer for any number of threads."""

    def __init__(self, tokenizer: TokenizerWrapper, parse_turn: TurnParser) -> None:
        self._tokenizer, self._parse_turn = tokenizer, parse_turn
        self._tool_format: ToolFormat | None = detect_tool_format(tokenizer)
        self._think_end = str(tokenizer.think_end or "")
        self._eos_texts = [str(tokenizer.decode([token])) for token in sorted(tokenizer.eos_token_ids)]
        self._eos_pattern = re.compile("|".join(map(re.escape, filter(None, self._eos_texts))) or r"\Z")
        self._verified_shapes: set[str] = set()  # of regions that read as they should
        self._parsed_turns: OrderedDict[bytes, ParsedTurn | None] = OrderedDict()
        self._parsed_turns_bytes = 0
        self._lock = threading.Lock()

    # ---- marking

    def mark_conversation(self, conversation: ChatConversation, turns: Iterable[SampledTurn]) -> MarkedConversation:
        """Mark every message whose turn is among these and still has the same content and calls."""
        by_ids = {tuple(turn.calls): turn.tokens for turn in turns}
        tools_key = xxhash.xxh3_128_digest(json.dumps(conversation.offered_tools).encode()) if by_ids else b""
        faithful = {}
        for index, item in enumerate(conversation.complete_items):
            sampled = by_ids.get(item.original.call_ids) if item.original.call_ids else None
            tokens = self._strip_eos(unpack_tokens(sampled)) if sampled and _is_content_intact(item) else []
            if tokens and self._is_same_turn(tokens, item.original, conversation.offered_tools, tools_key):
                faithful[index] = tokens
        return self._insert_placeholders(conversation, faithful)

    def unmark_messages(
        self, marked: MarkedConversation, original: ChatConversation, doubtful_messages: set[int]
    ) -> MarkedConversation:
        """Unmark the doubtful messages."""
        clear = {index: tokens for index, tokens in marked.sampled_tokens.items() if index not in doubtful_messages}
        return self._insert_placeholders(original, clear)

    def _strip_eos(self, tokens: list[int]) -> list[int]:
        """Strip the end-of-sequence token: the template writes it."""
        return tokens[:-1] if tokens and tokens[-1] in self._tokenizer.eos_token_ids else tokens

    def _is_same_turn(self, sampled: list[int], original: OriginalMessage, tools: Tools, tools_key: bytes) -> bool:
        if (read := self._parse_cached(sampled, tools, tools_key)) is None:
            return False
        content, calls = read
        if content.strip() != self._strip_reasoning(original.content).strip():
            return False
        return [name for name, _ in calls] == list(original.call_names) and all(
            _is_same_json(_parse_value(text), given)
            for (_, text), given in zip(calls, original.call_arguments, strict=True)
        )

    def _strip_reasoning(self, content: str) -> str:
        """Strip reasoning that some clients send before the content."""
        return content.rpartition(self._think_end)[2] if self._think_end else content

    def _parse_cached(self, sampled: list[int], tools: Tools, tools_key: bytes) -> ParsedTurn | None:
        key = tools_key + pack_tokens(sampled)
        with self._lock:
            if key in self._parsed_turns:
                self._parsed_turns.move_to_end(key)
                return self._parsed_turns[key]
        try:
            read = self._parse_turn(sampled, tools)
        except _PARSE_ERRORS:  # tokens of another tokenizer
            read = None
        self._cache_parsed(key, read)
        return read

    def _cache_parsed(self, key: bytes, parsed: ParsedTurn | None) -> None:
        with self._lock:
            if key in self._parsed_turns:  # by another thread meanwhile
                return
            self._parsed_turns[key] = parsed
            self._parsed_turns_bytes += _count_parsed_bytes(key, parsed)
            while len(self._parsed_turns) > PARSED_TURNS_MAX or self._parsed_turns_bytes > PARSED_TURNS_BYTES_MAX:
                self._parsed_turns_bytes -= _count_parsed_bytes(*self._parsed_turns.popitem(last=False))

    # ---- places

    def _insert_placeholders(
        self, conversation: ChatConversation, sampled_tokens: dict[int, list[int]]
    ) -> MarkedConversation:
        word = f"w{secrets.token_hex(8)}"
        items = [
            self._mark_item(item, index, word) if index in sampled_tokens else item
            for index, item in enumerate(conversation.items)
        ]
        return MarkedConversation(
            conversation=msgspec.structs.replace(conversation, items=items) if sampled_tokens else conversation,
            placeholder_pattern=re.compile(word + r"([cn])(\d+)z(\d+)q"),
            sampled_tokens=sampled_tokens,
        )

    def _mark_item(self, item: ConversationItem, index: int, prefix: str) -> ConversationItem:
        content, calls = item.message["content"], []
        spoken = self._strip_reasoning(content)
        content = content[: len(content) - len(spoken)] + (f"{prefix}c{index}z0q" if spoken.strip() else spoken)
        for number, call in enumerate(item.message.get("tool_calls", ())):
            function, name = call["function"], f"{prefix}n{index}z{number}q"
            nothing = "{}" if isinstance(function["arguments"], str) else {}
            marked = {**call, "function": {**function, "name": name, "arguments": nothing}}
            if str(call.get("id", "")).startswith(shown := f"functions.{function['name']}:"):
                marked["id"] = f"functions.{name}:{call['id'][len(shown) :]}"
            calls.append(marked)
        return item.replace(content=content, **({"tool_calls": calls} if calls else {}))

    def find_spans(self, marked: MarkedConversation, text: str, tail: str) -> tuple[list[SampledSpan], set[int]]:
        """Find the spans of turns in the rendered text, in their order, and the messages without a clear one.

        `tail`: the prompt's end, from the last message's end on, which begins every answer.
        """
        found: dict[int, list[re.Match[str]]] = {}
        for match in marked.placeholder_pattern.finditer(text):
            found.setdefault(int(match[2]), []).append(match)
        places: list[SampledSpan] = []
        doubtful: set[int] = set()
        for index, tokens in sorted(marked.sampled_tokens.items()):
            after = places[-1].end if places else 0
            calls = len(marked.conversation.items[index].message.get("tool_calls", ()))
            words = _order_placeholders(found.get(index, []), calls)
            place = self._find_span(text, after, words, tail, tokens) if words else None
            if place is None or not self._is_exact_region(text[place.start : place.end], words, marked):
                doubtful.add(index)
            else:
                places.append(place)
        return places, doubtful

    def _find_span(
        self, text: str, previous_end: int, placeholders: list[re.Match[str]], tail: str, tokens: list[int]
    ) -> SampledSpan | None:
        index, first, last = int(placeholders[0][2]), placeholders[0], placeholders[-1]
        end = self._find_end(text, last)
        begins = first.start() if first[1] == "c" else self._find_call_start(text, previous_end, first.start(), tail)
        if end is None or begins is None or begins < previous_end:
            return None
        header, _, _ = tail.partition(str(self._tokenizer.think_start)) if self._think_end else (tail, "", "")
        head = self._decode(tokens[:HEADER_TOKENS_MAX])
        if (own := header.strip()) and head.startswith(own) and text.endswith(own, previous_end, begins):
            start = begins - len(own)  # it began a message of its own
        else:
            start, keeps_space = self._find_start(text, previous_end, begins, header, tail)
            tokens = tokens if keeps_space else self._strip_leading_space(tokens)
        return SampledSpan(message_index=index, start=start, end=end, tokens=tokens)

    def _find_start(self, text: str, previous_end: int, content_start: int, header: str, tail: str) -> tuple[int, bool]:
        """Start of the text sampled after the reasoning, and whether its leading space belongs there."""
        bare = previous_end + len(text[previous_end:content_start].rstrip())
        if self._think_end and text.endswith(self._think_end, previous_end, bare):
            # A template that closed the reasoning itself went on with a space before the model did.
            own, thought = tail if tail.rstrip().endswith(self._think_end) else "", True
        else:
            own, thought = header, not self._think_end
        space = own[len(own.rstrip()) :]
        fits = text.startswith(space, bare) and bare + len(space) <= content_start
        return bare + len(space) if fits else content_start, thought

    def _strip_leading_space(self, tokens: list[int]) -> list[int]:
        """Strip the space between a reasoning that is not there and the answer."""
        position = next((position for position, token in enumerate(tokens) if self._decode([token]).strip()), 0)
        return tokens[position:]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def _find_call_start(self, text: str, previous_end: int, name_start: int, tail: str) -> int | None:
        marker = self._tool_format.start if self._tool_format else ""
        if marker and (position := text.rfind(marker, previous_end, name_start)) >= 0:
            return position
        header = tail.partition(str(self._tokenizer.think_start))[0] if self._think_end else tail
        position = text.rfind(header, previous_end, name_start) if header else -1
        return position + len(header) if position >= 0 else None

    def _find_end(self, text: str, last_placeholder: re.Match[str]) -> int | None:
        if last_placeholder[1] == "c":
            return last_placeholder.end()
        over = match.start() if (match := self._eos_pattern.search(text, last_placeholder.end())) else None
        if (marker := self._tool_format.end if self._tool_format else "") and marker not in self._eos_texts:
            position = text.find(marker, last_placeholder.end(), over)
            return position + len(marker) if position >= 0 else over
        return over

    def _is_exact_region(self, region: str, placeholders: list[re.Match[str]], marked: MarkedConversation) -> bool:
        """True where the region is the whole of these placeholders' message, and nothing else."""
        if {match[0] for match in marked.placeholder_pattern.finditer(region)} != {match[0] for match in placeholders}:
            return False
        names = [match[0] for match in placeholders if match[1] == "n"]
        if not names:
            return region == placeholders[0][0]
        shape = marked.placeholder_pattern.sub(lambda match: f"{match[1]}{match[3]}", region)
        if shape in self._verified_shapes:
            return True
        tokens = self._tokenizer.encode(region, add_special_tokens=False)
        try:
            content, calls = self._parse_turn(tokens, marked.conversation.offered_tools)
        except _PARSE_ERRORS:
            return False
        expected = placeholders[0][0] if placeholders[0][1] == "c" else ""
        reads = content.strip() == expected and [name for name, _ in calls] == names
        if reads and len(self._verified_shapes) < SHAPES_MAX:
            self._verified_shapes.add(shape)
        return reads


def _count_parsed_bytes(key: bytes, parsed: ParsedTurn | None) -> int:
    content, calls = parsed or ("", [])
    return len(key) + len(content) + sum(len(name) + len(arguments) for name, arguments in calls)


def _is_content_intact(item: ConversationItem) -> bool:
    """True where the content is in the message that the client sent it in."""
    return "tool_calls" not in item.message or bool(item.message["content"]) == bool(item.original.content)


def _order_placeholders(placeholders: list[re.Match[str]], calls: int) -> list[re.Match[str]]:
    """Placeholder of the content, if shown, and the first of each call; [] where they are out of order."""
    content = [match for match in placeholders if match[1] == "c"]
    names: dict[int, re.Match[str]] = {}
    for match in placeholders:
        if match[1] == "n":
            names.setdefault(int(match[3]), match)
    words = [*content, *names.values()]
    in_order = all(a.end() <= b.start() for a, b in pairwise(words))
    return words if in_order and len(content) <= 1 and list(names) == list(range(calls)) else []


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_same_json(a: Any, b: Any) -> bool:
    """Compare as JSON: a number is its value, true is no number, and an object has no order."""
    try:
        return _is_equal(a, b)
    except RecursionError:
        return False


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


# ---- the prompt


def splice_tokens(
    text: str, spans: list[SampledSpan], marked: MarkedConversation, tokenize: Callable[[str], TokenizedText]
) -> TokenizedText:
    """Tokenize the text, with sampled tokens for the spans.  Offsets are of the marked text."""
    ids: list[int] = []
    starts: list[int] = []  # characters at which the parts below begin
    parts: list[Callable[[int], int]] = []

    def add_text(start: int, end: int) -> None:
        piece = _RestoredText(text[start:end], marked.placeholder_pattern, partial(_resolve_placeholder, marked))
        tokens, token_at = tokenize(piece.text) if piece.text else ([], lambda _: 0)
        base = len(ids)
        starts.append(start)
        parts.append(lambda offset: base + token_at(piece.map_offset(offset - start)))
        ids.extend(tokens)

    position = 0
    for place in spans:
        add_text(position, place.start)
        base = len(ids)
        starts.append(place.start)
        parts.append(lambda _, base=base: base)  # type: ignore[misc]
        ids.extend(place.tokens)
        position = place.end
    add_text(position, len(text))
    return ids, lambda offset: parts[bisect_right(starts, offset) - 1](offset)


def _resolve_placeholder(marked: MarkedConversation, placeholder: re.Match[str]) -> str:
    """Original text of a placeholder that the template shows outside of its message."""
    original = marked.conversation.items[int(placeholder[2])].original
    return original.call_names[int(placeholder[3])] if placeholder[1] == "n" else original.content


class _RestoredText:
    """A piece of text with names restored, and the mapping of its offsets."""

    def __init__(self, marked_text: str, pattern: re.Pattern[str], resolve: Callable[[re.Match[str]], str]) -> None:
        self._edges, self._shifts = [0], [0]
        pieces, position, shift = [], 0, 0
        for match in pattern.finditer(marked_text):
            restored = resolve(match)
            pieces += [marked_text[position : match.start()], restored]
            position = match.end()
            shift += len(restored) - (match.end() - match.start())
            self._edges.append(position)
            self._shifts.append(shift)
        self.text = "".join([*pieces, marked_text[position:]]) if pieces else marked_text

    def map_offset(self, offset: int) -> int:
        return max(0, offset + self._shifts[bisect_right(self._edges, offset) - 1])
