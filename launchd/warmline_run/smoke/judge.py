"""Comparison of answers, for any model.  Pure."""

import math
import re
import struct
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from warmline_run.smoke.responses import ChatCompletion, TokenChoice

# Nats by the type that the log-probabilities were computed in, as in audits (docs/correctness.md).
TOLERANCE_FLOAT32, TOLERANCE_FLOAT16, TOLERANCE_BFLOAT16 = 1e-3, 0.125, 2.0
TOLERANCES_KV_BITS = {
    8: 0.4,
    6: 6.0,
    5: 6.0,
    4: 6.0,
    3: 12.0,
    2: 12.0,
}  # quantized KV, which the log-probabilities don't show
_UNUSED_BITS = ((0xFFFF, TOLERANCE_BFLOAT16), (0x1FFF, TOLERANCE_FLOAT16))  # of a float32 that was widened from it
LARGEST = 1e30  # and no NaN
WINDOW_CHARACTERS = 8
TEXT_CHARACTERS_MIN = 24
REPETITIVE_SHARE_MIN, VARIED_SHARE_MAX = 0.7, 0.4  # shares of repeated windows
MARKUP = re.compile(
    r"<\|[\w ./-]{1,40}\|>|<\uff5c[^\uff5c\n]{1,40}\uff5c>"
    r"|</?(?:think|tool_calls?|tool_response|arg_key|arg_value|function_calls?)>"
    r"|<(?:function|parameter|invoke)=?[\w .\"'=-]{0,40}>|</(?:function|parameter|invoke)>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|THINK|ARGS)\]|<</?SYS>>|</?s>"
    r"|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>|<\[?(?:BOS|EOS)\]?>"
)


def infer_tolerance(tokens: Iterable[TokenChoice]) -> float:
    """Tolerance of rounding between two runs, inferred from the bits that these values don't use."""
    values = [value for token in tokens for value in (token.logprob, *token.top.values()) if abs(value) < LARGEST]
    words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
    used = [word for word in words if word]  # 0.0 tells nothing
    return next(
        (tolerance for bits, tolerance in _UNUSED_BITS if used and not any(word & bits for word in used)),
        TOLERANCE_FLOAT32,
    )


def find_disagreement(one: ChatCompletion, other: ChatCompletion, tolerance: float = 0.0) -> str:
    """Description of where two greedy answers to one prompt part; "" where they don't, or part at a near tie.

    A near tie: in either run the two tokens' log-probabilities are within `tolerance` nats (0: by their type).
    """
    if one.full_text == other.full_text and one.finish_reason == other.finish_reason:
        return ""
    if not one.tokens or not other.tokens:
        place = _common_prefix_length(one.full_text, other.full_text)
        return f"they part at character {place}, and there are no log-probabilities to judge by"
    tolerance = tolerance or infer_tolerance((*one.tokens, *other.tokens))
    for place, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if mine.token != theirs.token:
            gap = max(_logprob_gap(mine, theirs.token), _logprob_gap(theirs, mine.token))
            return _describe_gap(place, gap, tolerance)
    place = min(len(one.tokens), len(other.tokens))
    longer = one.tokens if len(one.tokens) > place else other.tokens
    if len(longer) == place:
        is_same = one.full_text == other.full_text
        return "they end for different reasons" if is_same else "the same tokens became different text"
    # One answer goes on where the other one ends: the end may have been the runner-up.
    chosen = longer[place]
    others = [value for token, value in chosen.top.items() if token != chosen.token]
    return _describe_gap(place, chosen.logprob - max(others, default=-math.inf), tolerance)


def _describe_gap(place: int, gap: float, tolerance: float) -> str:
    if gap <= tolerance:
        return ""
    apart = f"{gap:.3g} nats apart" if math.isfinite(gap) else "nowhere near each other"
    return f"they part at token {place + 1}, where the two tokens are {apart} (tolerated: {tolerance:g})"


def _logprob_gap(chosen: TokenChoice, token: str) -> float:
    """Difference between the chosen token's log-probability and this token's; infinite where it is not listed."""
    gap = chosen.logprob - chosen.top.get(token, -math.inf)
    return math.inf if math.isnan(gap) else gap


def _common_prefix_length(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def logprob_difference(one: ChatCompletion, other: ChatCompletion) -> float:
    """Largest difference of chosen tokens' log-probabilities, as far as both answers chose the same; nats."""
    pairs = takewhile(lambda pair: pair[0].token == pair[1].token, zip(one.tokens, other.tokens, strict=False))
    return max([0.0, *(abs(mine.logprob - theirs.logprob) for mine, theirs in pairs)])  # 0.0 first: a NaN is no maximum


def is_collapsed(text: str, reference: str) -> bool:
    """True where a text repeats itself as broken models do, and the reference does not."""
    if min(len(text), len(reference)) < TEXT_CHARACTERS_MIN:
        return False
    return repetition_share(text) > REPETITIVE_SHARE_MIN and repetition_share(reference) < VARIED_SHARE_MAX


def repetition_share(text: str) -> float:
    """Share of a text's windows that repeat an earlier one: 0 where the text never repeats itself."""
    windows = [text[at : at + WINDOW_CHARACTERS] for at in range(len(text) - WINDOW_CHARACTERS + 1)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0


def find_markup(text: str) -> str:
    """First marker of a template, reasoning or tool format in a text; "" for none."""
    match = MARKUP.search(text)
    return match[0] if match else ""


def find_argument_flaw(arguments: Any, schema: Mapping[str, Any]) -> str:
    """Violation of a schema ("enum", bounded "integer", "boolean") by an object, or ""."""
    if not isinstance(arguments, Mapping):
        return "they are no object"
    properties: Mapping[str, Any] = schema["properties"]
    if missing := [name for name in schema["required"] if name not in arguments]:
        return f"{missing[0]!r} is missing"
    if unknown := [name for name in arguments if name not in properties]:
        return f"{unknown[0]!r} is no argument of it"
    for name, value in arguments.items():
        if not _matches_schema(value, properties[name]):
            return f"{name!r} is {value!r}, which its schema does not allow"
    return ""


def _matches_schema(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool) and schema["minimum"] <= value <= schema["maximum"]
