"""Replay of sampled answers with tool calls, in place of the template's rendering of them.

A client sends calls back parsed: their spaces, order and escapes are not the model's any more.  Where the sampled
tokens still parse to what the client sends, they stand in the prompt, so that a prompt begins as the last one went on.

The conversation is rendered with placeholders, random words, for such a message's content and the names of its calls.
They are the same in each turn, whose messages are then known (`message_ends`).  They show the place of the tokens;
where it is ambiguous the message stays as rendered.
"""

import json
import re
import secrets
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import dropwhile, pairwise
from typing import Any

import msgspec
import xxhash
from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.prompt.messages import ChatConversation, decode_arguments
from warmline_backend.prompt.template_compat import ConversationItem, OriginalMessage
from warmline_backend.prompt.tokenization.text_tokenizer import Tokens
from warmline_backend.request.params import Tools
from warmline_backend.tool_parsers.registry import ToolFormat, detect_tool_format
from warmline_common.protocol.messages import SampledTurn
from warmline_common.protocol.tokens import TokenArray, pack_tokens, unpack_tokens

ParsedTurn = tuple[str, list[tuple[str, str]]]  # content, and the calls' names and arguments as JSON
TurnParser = Callable[[Sequence[int], Tools], ParsedTurn]  # tokens of an answer, and the prompt's tools
TokenizeFunction = Callable[[str, int], Tokens]  # of a text, and the number of tokens before it

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

    def resolve_placeholder(self, placeholder: re.Match[str]) -> str:
        """Original text of a placeholder that the template shows outside of its message."""
        original = self.conversation.items[int(placeholder[2])].original
        return original.call_names[int(placeholder[3])] if placeholder[1] == "n" else original.content


class ToolCallReplayer:
    """Replayer for any number of threads."""

    def __init__(self, tokenizer: TokenizerWrapper, parse_turn: TurnParser) -> None:
        self._tokenizer, self._parse_turn = tokenizer, parse_turn
        self._tool_format: ToolFormat | None = detect_tool_format(tokenizer)
        self._think_end = str(tokenizer.think_end or "")
        self._eos_texts = [str(tokenizer.decode([token])) for token in sorted(tokenizer.eos_token_ids)]
        self._eos_pattern = re.compile("|".join(map(re.escape, filter(None, self._eos_texts))) or r"\Z")
        self._word = f"w{secrets.token_hex(8)}"  # begins placeholders, the same in each turn of a conversation
        self._verified_shapes: set[str] = set()  # of regions that read as they should
        self._parsed_turns: OrderedDict[bytes, ParsedTurn | None] = OrderedDict()
        self._parsed_turns_bytes = 0
        self._lock = threading.Lock()

    # ---- marking

    def find_sampled_tokens(self, conversation: ChatConversation, turns: Iterable[SampledTurn]) -> dict[int, list[int]]:
        """Sampled tokens, by message, for messages that still have the content and calls of one of these turns."""
        tokens_by_ids = {tuple(turn.calls): turn.tokens for turn in turns if turn.calls}
        tools_key = xxhash.xxh3_128_digest(json.dumps(conversation.offered_tools).encode()) if tokens_by_ids else b""
        sampled_tokens = {}
        for index, item in enumerate(conversation.complete_items):
            packed = tokens_by_ids.get(item.original.call_ids)
            tokens = unpack_tokens(packed) if packed and _is_content_intact(item) else []
            if tokens and tokens[-1] in self._tokenizer.eos_token_ids:  # the template writes it
                tokens = tokens[:-1]
            if tokens and self._is_same_turn(tokens, item.original, conversation.offered_tools, tools_key):
                sampled_tokens[index] = tokens
        return sampled_tokens

    def _is_same_turn(self, sampled: list[int], original: OriginalMessage, tools: Tools, tools_key: bytes) -> bool:
        if (parsed := self._parse_cached(sampled, tools, tools_key)) is None:
            return False
        content, calls = parsed
        if content.strip() != self._strip_reasoning(original.content).strip():
            return False
        return [name for name, _ in calls] == list(original.call_names) and all(
            _is_same_json(decode_arguments(text), arguments)
            for (_, text), arguments in zip(calls, original.call_arguments, strict=True)
        )

    def _strip_reasoning(self, content: str) -> str:
        """Strip reasoning that some clients send before the content."""
        return content.rpartition(self._think_end)[2] if self._think_end else content

    def clear_cache(self) -> None:
        """Drop the answers that were parsed."""
        with self._lock:
            self._parsed_turns.clear()
            self._parsed_turns_bytes = 0

    def _parse_cached(self, sampled: list[int], tools: Tools, tools_key: bytes) -> ParsedTurn | None:
        key = tools_key + pack_tokens(sampled)
        with self._lock:
            if key in self._parsed_turns:
                self._parsed_turns.move_to_end(key)
                return self._parsed_turns[key]
        try:
            parsed = self._parse_turn(sampled, tools)
        except _PARSE_ERRORS:  # tokens of another tokenizer
            parsed = None
        with self._lock:
            if key not in self._parsed_turns:  # else another thread was faster
                self._parsed_turns[key] = parsed
                self._parsed_turns_bytes += _count_parsed_bytes(key, parsed)
            while len(self._parsed_turns) > PARSED_TURNS_MAX or self._parsed_turns_bytes > PARSED_TURNS_BYTES_MAX:
                self._parsed_turns_bytes -= _count_parsed_bytes(*self._parsed_turns.popitem(last=False))
        return parsed

    # ---- spans

    def mark_conversation(self, conversation: ChatConversation, sampled: dict[int, list[int]]) -> MarkedConversation:
        """Put placeholders into the messages with sampled tokens."""
        word, items = self._word, list(conversation.items)
        for index in sampled:
            items[index] = self._mark_item(items[index], index, word)
        return MarkedConversation(
            conversation=msgspec.structs.replace(conversation, items=items),
            placeholder_pattern=re.compile(word + r"([cn])(\d+)z(\d+)q"),
            sampled_tokens=sampled,
        )

    def _mark_item(self, item: ConversationItem, index: int, prefix: str) -> ConversationItem:
        content, calls = item.message["content"], []
        answer = self._strip_reasoning(content)
        content = content.removesuffix(answer) + (f"{prefix}c{index}z0q" if answer.strip() else answer)
        for number, call in enumerate(item.calls):
            function, name = call["function"], f"{prefix}n{index}z{number}q"
            empty = "{}" if isinstance(function["arguments"], str) else {}
            marked = {**call, "function": {**function, "name": name, "arguments": empty}}
            if str(call.get("id", "")).startswith(id_prefix := f"functions.{function['name']}:"):
                marked["id"] = f"functions.{name}:{call['id'].removeprefix(id_prefix)}"
            calls.append(marked)
        return item.replace(content=content, **({"tool_calls": calls} if calls else {}))

    def find_spans(self, marked: MarkedConversation, text: str, tail: str) -> tuple[list[SampledSpan], set[int]]:
        """Find the spans of turns in the rendered text, in their order, and the messages without a clear span.

        `tail`: the prompt's end, from the last message's end on, which begins every answer.
        """
        matches: dict[int, list[re.Match[str]]] = {}
        for match in marked.placeholder_pattern.finditer(text):
            matches.setdefault(int(match[2]), []).append(match)
        spans: list[SampledSpan] = []
        doubtful: set[int] = set()
        for index, tokens in sorted(marked.sampled_tokens.items()):
            previous_end = spans[-1].end if spans else 0
            placeholders = _order_placeholders(matches.get(index, []), len(marked.conversation.items[index].calls))
            span = self._find_span(text, previous_end, placeholders, tail, tokens) if placeholders else None
            if span is None or not self._is_exact_region(text[span.start : span.end], placeholders, marked):
                doubtful.add(index)
            else:
                spans.append(span)
        return spans, doubtful

    def _find_span(
        self, text: str, previous_end: int, placeholders: list[re.Match[str]], tail: str, tokens: list[int]
    ) -> SampledSpan | None:
        first, end = placeholders[0], self._find_end(text, placeholders[-1])
        header = tail.partition(str(self._tokenizer.think_start))[0] if self._think_end else tail
        begin = first.start() if first[1] == "c" else self._find_call_start(text, previous_end, first.start(), header)
        if end is None or begin is None or begin < previous_end:
            return None
        head = self._decode(tokens[:HEADER_TOKENS_MAX])
        if (opening := header.strip()) and head.startswith(opening) and text.endswith(opening, previous_end, begin):
            start = begin - len(opening)  # it began a message of its own
        else:
            start, keeps_space = self._find_start(text, previous_end, begin, header, tail)
            if not keeps_space:  # the space stands between a reasoning that is not there and the answer
                tokens = list(dropwhile(lambda token: not self._decode([token]).strip(), tokens)) or tokens
        return SampledSpan(message_index=int(first[2]), start=start, end=end, tokens=tokens)

    def _find_start(self, text: str, previous_end: int, content_start: int, header: str, tail: str) -> tuple[int, bool]:
        """Start of the text sampled after the reasoning, and whether its leading space belongs there."""
        bare = previous_end + len(text[previous_end:content_start].rstrip())
        if self._think_end and text.endswith(self._think_end, previous_end, bare):
            # A template that closed the reasoning itself went on with a space before the model did.
            lead, keeps_space = tail if tail.rstrip().endswith(self._think_end) else "", True
        else:
            lead, keeps_space = header, not self._think_end
        space = lead[len(lead.rstrip()) :]
        fits = text.startswith(space, bare) and bare + len(space) <= content_start
        return bare + len(space) if fits else content_start, keeps_space

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def _find_call_start(self, text: str, previous_end: int, name_start: int, header: str) -> int | None:
        marker = self._tool_format.start if self._tool_format else ""
        if marker and (position := text.rfind(marker, previous_end, name_start)) >= 0:
            return position
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
        is_exact = content.strip() == expected and [name for name, _ in calls] == names
        if is_exact and len(self._verified_shapes) < SHAPES_MAX:
            self._verified_shapes.add(shape)
        return is_exact


def _count_parsed_bytes(key: bytes, parsed: ParsedTurn | None) -> int:
    content, calls = parsed or ("", [])
    return len(key) + len(content) + sum(len(name) + len(arguments) for name, arguments in calls)


def _is_content_intact(item: ConversationItem) -> bool:
    """True where the message still has the content that its client sent."""
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
    text: str, spans: list[SampledSpan], marked: MarkedConversation, tokenize: TokenizeFunction
) -> Tokens:
    """Tokenize the text, with sampled tokens for the spans.  Offsets are of the marked text."""
    ids = TokenArray()
    starts: list[int] = []  # characters at which the parts below begin
    parts: list[Callable[[int], int]] = []

    def add_part(start: int, tokens: Iterable[int], token_at: Callable[[int], int]) -> None:
        base = len(ids)
        starts.append(start)
        parts.append(lambda offset: base + token_at(offset - start))
        ids.extend(tokens)

    position = 0
    for span in spans:
        add_part(position, *_tokenize_restored(text[position : span.start], len(ids), marked, tokenize))
        add_part(span.start, span.tokens, lambda _: 0)
        position = span.end
    add_part(position, *_tokenize_restored(text[position:], len(ids), marked, tokenize))
    return ids, lambda offset: parts[bisect_right(starts, offset) - 1](offset)


def _tokenize_restored(
    marked_text: str, tokens_before: int, marked: MarkedConversation, tokenize: TokenizeFunction
) -> Tokens:
    """Tokenize a piece of text with its placeholders resolved.  Offsets are of the marked text."""
    if not marked_text:
        return TokenArray(), lambda _: 0
    edges, shifts = [0], [0]
    for match in marked.placeholder_pattern.finditer(marked_text):
        edges.append(match.end())
        shifts.append(shifts[-1] + len(marked.resolve_placeholder(match)) - len(match[0]))
    text = marked.placeholder_pattern.sub(marked.resolve_placeholder, marked_text)
    tokens, token_at = tokenize(text, tokens_before)
    return tokens, lambda offset: token_at(max(0, offset + shifts[bisect_right(edges, offset) - 1]))
