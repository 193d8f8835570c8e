"""Causes of cold starts: the likeliest cause of a request's reuse, with its meaning and advice.  Pure.

Evidence: the planner's reason (`RequestRecord.why_not_warmer`) and the prompt's `Divergence` from stored tokens, with
the texts of both sides.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from warmline_common.protocol.tokens import count_common_chars
from warmline_proxy.explain.volatile import BILLING, DATES, IDS, TIMES, find_replaced_span
from warmline_proxy.planner import TOOLS_ROLE
from warmline_proxy.store.rows import Divergence

COMPARED_CHARS_MIN = 16  # without spaces, of texts that differ in their spaces alone
NEAR_CHARS = 16  # around a difference, in which a reasoning tag belongs to the answer
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class Cause:
    """Meaning of a cause and advice to users; "" where there is nothing to do."""

    meaning: str
    advice: str = ""


NEW_TEXT = "new-text"

# By name, for this module and `explain`; docs/explain.md has the same table.
CAUSES = {
    "warm": Cause("All of the prompt but its last token was reused."),
    NEW_TEXT: Cause("The whole known part of the conversation was reused; the rest was never sent before."),
    "timestamp": Cause(
        "A time in the prompt has changed, and all text after it must be computed anew.",
        'In the system text, `stabilize = "times"` evens it out; elsewhere, have the client drop it or say it last.',
    ),
    "date": Cause(
        "A date in the prompt has changed, and all text after it must be computed anew.",
        'Once a day this is the price of telling the date; `stabilize = "dates"` takes it out of the system text.',
    ),
    "random-id": Cause(
        "An id or a hash in the prompt has changed, and all text after it must be computed anew.",
        'In the system text, `stabilize = "ids"` evens it out; elsewhere, have the client drop it or say it last.',
    ),
    "billing-header": Cause(
        "The client puts a line for its own billing at the top of the prompt, which changes from request to request.",
        '`stabilize = "billing"` takes it out.',
    ),
    "number": Cause(
        "A number in the prompt is another one than last time: a count, a budget or a price, perhaps.",
        "Have the client leave it out or send it last; text that changes belongs at the end of a prompt.",
    ),
    "whitespace": Cause(
        "Only spaces or line ends differ: the client trims or reformats the text that it sends back.",
        "Have the client send texts back as they came.",
    ),
    "tools-changed": Cause(
        "The tools are not the same: one was added, taken away or described otherwise.",
        "Have the client offer the same tools all along; templates put them before all messages.",
    ),
    "tool-order": Cause("The tools are the same, in another order.", '`stabilize = "tool-order"` sorts them.'),
    "system-edited": Cause(
        "The system text was edited, or it is another agent's.",
        "Put the parts that change between requests at its end, or into the last message.",
    ),
    "message-edited": Cause(
        "An earlier message was edited or removed, and the conversation differs from there on.",
        "If the user did not edit it, see how the client changes earlier messages: many shorten tool results.",
    ),
    "other-message": Cause(
        "The prompts begin alike, and the last message is another one: a new conversation, or the last message edited."
    ),
    "answer-changed": Cause(
        "The client sends an earlier answer back in another form, or sends one that was never generated.",
        "Have the client send answers back as they came, calls and reasoning included.",
    ),
    "reasoning-left-out": Cause(
        "The model's template leaves the reasoning of earlier turns out, as it does once a user has spoken again.",
        "The model was trained this way; only the last turn's answers are computed again. Some templates have an"
        " argument that keeps the reasoning (`chat_template_args`).",
    ),
    "reasoning-dropped": Cause(
        "The client sends an answer back without the reasoning that came before it.",
        "Have the client send `reasoning_content` back with each of its messages, if it can.",
    ),
    "truncated": Cause(
        "The client has left out messages in the middle: the text after this place was further on before.",
        "Clients do this when their limit for the context is near; a higher limit makes it rarer.",
    ),
    "compacted": Cause(
        "The client has put a summary in the place of earlier messages.",
        "Clients do this when their limit for the context is near; a higher limit makes it rarer.",
    ),
    "template": Cause(
        "The messages are the same, and the template ends the prompt otherwise: reasoning switched on or off, perhaps.",
        "Keep `enable_thinking`, `reasoning_effort` and template arguments the same within a conversation.",
    ),
    "differs": Cause("The text here differs from all known prompts."),
    "evicted": Cause(
        "The rest was stored, and was evicted since, for the disk budget.",
        "Raise `disk_budget_gb`, or pin the conversation (`cachectl pin`).",
    ),
    "damaged": Cause(
        "A file of it could not be used, and was taken out of use.",
        "`cachectl verify --deep` reads all others; files that are damaged again and again speak of the disk.",
    ),
    "missing": Cause(
        "A file of it had vanished from the home.",
        "Nothing but Warmline should delete files there; the rest was computed anew and stored again.",
    ),
    "suspect": Cause(
        "What is stored is being examined: an audit found an answer that differs from a cold run's.",
        "`cachectl stats` shows the audits, docs/correctness.md explains them.",
    ),
    "restore-failed": Cause(
        "Restoring failed or took too long, and was cancelled.",
        "The log says more; see whether the disk is slow, or the memory short (`memory_budget_gb`).",
    ),
    "gone": Cause(
        "What the request was to start from left the memory before it could, several times.",
        "The memory is short of conversations: raise `memory_budget_gb`, or send fewer at once.",
    ),
    "no-checkpoint": Cause(
        "The model resumes only at a checkpoint, and the last one lies before this place.",
        "Nothing to do: the next turn starts further on.",
    ),
    "exact-grid": Cause(
        "In exact mode only whole prefill steps are kept, so that each answer has a cold run's very bits.",
        'A smaller `prefill_step_size` loses less; `reuse = "fast"` loses nothing.',
    ),
    "memory": Cause(
        "This model's cache can't be written to disk: it is reused while it is in memory, and no longer.",
        "See docs/correctness.md for the caches that can.",
    ),
    "slower": Cause("More of it is on disk, and restoring that would have taken longer than computing it."),
    "shared": Cause(
        "Another request computed the same beginning at that time, and this one started from a copy of it."
    ),
    "first-request": Cause(
        "Nothing was stored for it: the first request with this model and client key since the home was made, or since"
        " a purge."
    ),
    "other-model": Cause(
        "What is stored belongs to another model: its weights, configuration, adapter, draft model, KV quantization or"
        " code changed, or in exact mode mlx did.",
        "If this was not intended, undo it; the other one's data is evicted in time, or purged.",
    ),
    "other-key": Cause(
        "The same prompt is stored for another client key, or from before there were any: each has a cache of its own.",
        "`share_cache = true` has all keys use the one of requests without a key.",
    ),
    "removed-key": Cause(
        "The same prompt is stored for a client key that was removed; no request can use it any more.",
        "`cachectl key rotate` renews a key and keeps its cache; `cachectl purge --key 'a removed key'` removes what"
        " such keys have left.",
    ),
    "client-asked": Cause("The request itself forbade it.", "Leave `cache_prompt: false` out."),
    "reuse-off": Cause("The proxy runs with `reuse = off`.", 'Set `reuse = "fast"`.'),
    "nothing-asked": Cause("No token was to be computed."),
    "not-planned": Cause("It ended before its start was planned: it was refused or cancelled."),
    "unknown": Cause("Nothing is known of it."),
}

# Planner's reasons, most specific first; "": the texts of the divergence decide.
_REASON_PATTERNS = [
    (r"^$", "warm"),
    (r"reuse is off", "reuse-off"),
    (r"nothing is to be computed", "nothing-asked"),
    (r"the client asked for no reuse", "client-asked"),
    (r"was gone, twice", "gone"),
    (r"another request computes", "shared"),
    (r"is suspect", "suspect"),
    (r"restore failed|restoring took more than", "restore-failed"),
    (r"quarantined \(|\b(truncated|checksum|foreign|tokens|rows|io|missing) in ([0-9a-f]{8}|the chain):", "damaged"),
    (r"evicted after token", "evicted"),
    (r"missing after token", "missing"),
    (r"would take longer", "slower"),
    (r"not persistent", "memory"),
    (r"differs from what is", ""),
    (r"nothing stored", "first-request"),
    (r"no checkpoint after token", "no-checkpoint"),
    (r"exact mode keeps", "exact-grid"),
    (r"all of it is stored|stored up to token|in memory up to token", NEW_TEXT),
]
_SECONDARY_REASONS = {"no-checkpoint": "no checkpoint after token", "exact-grid": "exact mode keeps"}
# Additions of planner and prompt_head to the reason.
_PLACE_PATTERNS = [
    (r"the template leaves out its reasoning", "reasoning-left-out"),
    (r": a time(?: of day)? in line|: a Unix time in line", "timestamp"),
    (r": a date in line", "date"),
    (r": a (?:UUID|hash or random id|random id) in line", "random-id"),
    (r": a billing header in line", "billing-header"),
    (r"the tools come in another order", "tool-order"),
    (r": tools: ", "tools-changed"),
]
_RULE_CAUSES = {TIMES: "timestamp", DATES: "date", IDS: "random-id", BILLING: "billing-header"}
_SUMMARY = re.compile(
    r"summar|compact(?:ed|ion)|continued from|ran out of context|earlier (?:messages|conversation)", re.I
)
_REASONING = re.compile(r"</?think|<\|channel\|>analysis|\[/?THINK\]|<seed:think>", re.I)
_TOOLS = re.compile(r"\"(?:parameters|input_schema|properties|function)\"\s*:")
_NUMBER = re.compile(r"\d[\d.,_]*")


def find_cause(why: str, divergence: Divergence | None) -> str:
    """Find the likeliest cause, a name in CAUSES, of a planner's reason `why`."""
    reason_cause = next((cause for pattern, cause in _REASON_PATTERNS if re.search(pattern, why)), "unknown")
    if reason_cause:
        return reason_cause
    if divergence is None:
        return _find_place_cause(why) or "differs"
    return next(filter(None, _iter_text_causes(why, divergence)), "differs")


def find_secondary_causes(why: str, cause: str) -> list[str]:
    """List the causes that moved the start further back from the divergence or the end of the stored text."""
    return [name for name, reason in _SECONDARY_REASONS.items() if reason in why and name != cause]


def _iter_text_causes(why: str, divergence: Divergence) -> Iterator[str]:
    """Yield causes, most specific first; "" for those that don't apply."""
    yield _find_place_cause(why)
    old, new = divergence.stored_text, divergence.prompt_text
    at = count_common_chars(old, new)
    if old and new:
        span = find_replaced_span(old, new, at)
        yield _RULE_CAUSES[span.rule] if span else ""
        has_numbers = _has_number_at(old, at) and _has_number_at(new, at)
        yield "number" if has_numbers and not _is_in_last_message(divergence) else ""
        yield "whitespace" if _is_same_but_spaces(old[at:], new[at:]) else ""
        near = slice(max(0, at - NEAR_CHARS), at + NEAR_CHARS)
        has_lost_reasoning = _REASONING.search(old[near]) and not _REASONING.search(new[near])
        yield "reasoning-dropped" if has_lost_reasoning and divergence.role in ("assistant", "") else ""
    elif "it came without reasoning" in why:
        yield "reasoning-dropped"
    yield _find_role_cause(divergence, old, new, at)


def _find_place_cause(why: str) -> str:
    return next((cause for pattern, cause in _PLACE_PATTERNS if re.search(pattern, why)), "")


def _has_number_at(text: str, at: int) -> bool:
    return any(found.start() <= at < found.end() for found in _NUMBER.finditer(text))


def _is_same_but_spaces(old: str, new: str) -> bool:
    unspaced = ["".join(text.split()) for text in (old, new)]
    shorter = min(map(len, unspaced))
    # Both windows have the same number of tokens, so one of the texts may end earlier.
    return shorter >= COMPARED_CHARS_MIN and count_common_chars(*unspaced) == shorter


def _find_role_cause(divergence: Divergence, old: str, new: str, at: int) -> str:
    if divergence.role == TOOLS_ROLE:
        return "tools-changed"
    if _SUMMARY.search(new[at:]) and not _SUMMARY.search(old):
        return "compacted"
    if divergence.role in _SYSTEM_ROLES:  # which may have the tools in it
        return "tools-changed" if _TOOLS.search(old) and _TOOLS.search(new) else "system-edited"
    if divergence.role == "assistant":
        return "answer-changed"
    if divergence.comes_later:
        return "truncated"
    if divergence.messages and not divergence.message:
        return "template"
    if divergence.message:
        return "other-message" if _is_in_last_message(divergence) else "message-edited"
    return ""


def _is_in_last_message(divergence: Divergence) -> bool:
    """True for the last message of a user or a tool, also where the number of messages is not known."""
    is_last = divergence.message > 0 and divergence.message_last >= divergence.messages
    return is_last and divergence.role not in (*_SYSTEM_ROLES, "assistant")
