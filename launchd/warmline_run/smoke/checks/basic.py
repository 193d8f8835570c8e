"""Checks by short requests: load, completion, exact answers, streams, names, markup."""

import asyncio
import json
import time
from typing import Any

from warmline_run.smoke.check import CheckFailedError, CheckNotRunError, Target, format_excerpt
from warmline_run.smoke.client import BAD_REQUEST, NoAnswerError
from warmline_run.smoke.judge import find_disagreement, find_markup
from warmline_run.smoke.responses import ChatCompletion, Message, parse_models

READY_POLL_S = 1.0
WITH_LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}  # most servers give as many
ARBITRARY_MODEL_NAMES = ("openai/gates-a", "any/name at all")
FORCED_WORD = "warm-4711"
FORCED_TOKENS_MAX = 512
LOOK_FUNCTION = {"name": "look", "description": "List a folder.", "parameters": {"type": "object", "properties": {}}}
NO_TOOLS = {"tools": [{"type": "function", "function": LOOK_FUNCTION}], "tool_choice": "none"}
# Name, system prompt, question and fields of each case.
MARKUP_CASES: tuple[tuple[str, list[Message], str, dict[str, Any]], ...] = (
    ("a short answer", [], "What is two and two?", {"max_tokens": 3}),
    ("a longer answer", [], "Tell a story of a fox.", {}),
    ("stop words", [], "Count to ten.", {"stop": ["\n", "e", "}"]}),
    ("a system prompt", [{"role": "system", "content": "You are brief."}], "Hello!", {}),
    ("thoughts", [], "Is 91 prime?", {"chat_template_kwargs": {}}),
    ("tools that are off", [], "Look.", NO_TOOLS),
)


async def check_load(target: Target) -> str:
    """Wait for a model that is still loading, as long as one request may take."""
    status, models = await target.client.get("/models")
    names = [each["id"] for each in parse_models(models)] if status == 200 else []
    if not names:
        raise CheckFailedError(
            f"GET /v1/models answered {status} and lists no model",
            "is this the URL of an OpenAI-compatible server, with /v1?",
        )
    await _wait_until_ready(target)
    answer = await target.client.complete(target.make_messages("load", "Hello!"), max_tokens=1)
    if not answer.finish_reason:
        raise CheckFailedError("one token was asked for, and the answer has no finish_reason")
    return f"serves {names[0]}"


async def _wait_until_ready(target: Target) -> None:
    """Wait for /ready; a server without it is taken to be ready."""
    until = time.monotonic() + target.client.timeout_s
    while True:
        status, body = await target.client.get("//ready")
        if status != 503:
            return
        if time.monotonic() + READY_POLL_S > until:
            reason = json.dumps(body) if body is not None else "no reason given"
            advice = "wait until the model is loaded; the server's log says how far it is"
            raise CheckFailedError(f"GET /ready says 503: {reason}", advice)
        await asyncio.sleep(READY_POLL_S)


async def check_completion(target: Target) -> str:
    answer = await target.complete(target.make_messages("completion", "Name three large rivers."))
    if not answer.full_text.strip():
        raise CheckFailedError(
            f"the answer is empty (finish_reason {answer.finish_reason!r})",
            "look at the chat template: `warmline doctor MODEL`",
        )
    if answer.finish_reason not in ("stop", "length"):
        raise CheckFailedError(f"finish_reason is {answer.finish_reason!r}, not 'stop' or 'length'")
    used = answer.usage.get("completion_tokens")
    if not answer.prompt_tokens or not isinstance(used, int) or not 0 < used <= target.scale.answer_tokens:
        raise CheckFailedError(f"usage can't be right: {json.dumps(dict(answer.usage))}")
    return f"{answer.prompt_tokens} tokens in, {used} out: {format_excerpt(answer.full_text, 40)}"


async def check_exact_answer(target: Target) -> str:
    messages = target.make_messages("exact", "Describe the sea in a few words.")
    first, second = [await target.complete(messages, **WITH_LOGPROBS) for _ in range(2)]
    if flaw := find_disagreement(first, second, target.tolerance):
        texts = f"{format_excerpt(first.full_text)}, then {format_excerpt(second.full_text)}"
        raise CheckFailedError(
            f"asked twice at temperature 0, {flaw}: {texts}",
            "something is random, or the second answer was computed from a wrong cache",
        )
    return f"twice {format_excerpt(first.full_text, 40)}; {await check_forced_value(target, FORCED_WORD)}"


def make_single_value_format(word: str) -> dict[str, Any]:
    """A response_format that leaves the model no choice, whatever it would rather say."""
    properties = {"answer": {"type": "string", "enum": [word]}}
    schema = {"type": "object", "properties": properties, "required": ["answer"], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "one_value", "strict": True, "schema": schema}}


async def check_forced_value(target: Target, word: str) -> str:
    """Request a value that the form forces; returns a line for people.

    Raises CheckFailedError for another answer, CheckNotRunError where the server refuses in words.
    """
    question = f'Answer with the JSON object {{"answer": "{word}"}} and nothing else.'
    messages = target.make_messages(f"exact {word}", question)
    try:
        answer = await target.client.complete(
            messages, max_tokens=FORCED_TOKENS_MAX, response_format=make_single_value_format(word)
        )
    except NoAnswerError as error:
        if error.status != BAD_REQUEST:
            raise
        raise CheckNotRunError(f"no answer can be held to a form here: the server {error}") from None
    if has_only_reasoning(answer):
        return f"whether it can be held to one value was not seen, for it thinks for {FORCED_TOKENS_MAX} tokens or more"
    try:
        is_right = json.loads(answer.text) == {"answer": word}
    except ValueError:
        is_right = False
    if not is_right:
        raise CheckFailedError(
            f"response_format allows nothing but {word!r}, and the answer is "
            f"{format_excerpt(answer.text or answer.reasoning)}",
            "structured output is ignored here, as mlx_lm.server does",
        )
    return "held to one value, it gives that value"


def has_only_reasoning(answer: ChatCompletion) -> bool:
    """True for an answer that was cut in its reasoning: some models reason although it is switched off."""
    return answer.finish_reason == "length" and bool(answer.reasoning) and not answer.text and not answer.tool_calls


async def check_streaming(target: Target) -> str:
    messages = target.make_messages("stream", "Describe a mountain in a few words.")
    whole = await target.complete(messages, **WITH_LOGPROBS)
    streamed = await target.client.stream(messages, max_tokens=target.scale.answer_tokens, **WITH_LOGPROBS)
    if not streamed.has_done_marker:
        raise CheckFailedError(
            "the stream ends without [DONE]",
            "clients take that for a broken connection, or for the end of half an answer",
        )
    if not streamed.usage:
        raise CheckFailedError("the stream has no usage, though stream_options.include_usage asked for it")
    if flaw := find_disagreement(whole, streamed, target.tolerance):
        texts = f"{format_excerpt(whole.full_text)} and {format_excerpt(streamed.full_text)}"
        raise CheckFailedError(f"streamed and not streamed, {flaw}: {texts}")
    counts = [
        tuple(answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens")) for answer in (whole, streamed)
    ]
    if counts[0] != counts[1]:
        raise CheckFailedError(f"usage differs: {counts[0]} not streamed, {counts[1]} streamed")
    return f"{streamed.usage.get('completion_tokens')} tokens, the same as in one piece, then usage and [DONE]"


async def check_any_name(target: Target) -> str:
    for name in ARBITRARY_MODEL_NAMES:
        for ask in (target.client.complete, target.client.stream):
            try:
                answer = await ask(target.make_messages("name", "Hello!"), max_tokens=2, model=name)
            except NoAnswerError as error:
                raise CheckFailedError(
                    f"a request for the model {name!r} {error}",
                    "LiteLLM and agents send names of their own; this server requires its own (so does mlx_lm.server)",
                ) from None
            if answer.model != name:
                raise CheckFailedError(
                    f"asked for {name!r}, the answer calls its model {answer.model!r}",
                    "clients that check the name will refuse it",
                )
    return f"{ARBITRARY_MODEL_NAMES[0]!r} and {ARBITRARY_MODEL_NAMES[1]!r} are served, and come back as they were sent"


async def check_no_markup(target: Target) -> str:
    """Answers that end by length, by stop words and by themselves; with system prompt, reasoning and disabled tools."""
    characters = 0
    for number, (case, system, question, fields) in enumerate(MARKUP_CASES, start=1):
        messages = [*system, *target.make_messages(f"markup {number}", question)]
        for ask in (target.client.complete, target.client.stream):
            answer = await ask(messages, **{"max_tokens": 4 * target.scale.answer_tokens, **fields})
            _check_answer_markup(case, answer, fields.get("stop", []))
            characters += len(answer.full_text)
    if not characters:
        raise CheckNotRunError("no answer said anything")
    return f"none in {2 * len(MARKUP_CASES)} answers, {characters} characters"


def _check_answer_markup(case_name: str, answer: ChatCompletion, stop_words: list[str]) -> None:
    for part, text in (("content", answer.text), ("reasoning", answer.reasoning)):
        if found := find_markup(text):
            raise CheckFailedError(
                f"{found!r} stands in the {part} of {case_name}: {format_excerpt(text)}",
                "the server does not take the model's markers out; clients would show them, or send them back",
            )
    if word := next((word for word in stop_words if word in answer.text), ""):
        raise CheckFailedError(f"the stop word {word!r} stands in the content: {format_excerpt(answer.text)}")
