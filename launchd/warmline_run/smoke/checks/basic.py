"""Gates that any short request passes or fails: load, completion, exact answers, streams, names, markup."""

import asyncio
import json
from typing import Any

from warmline_run.smoke.check import Failed, NotRun, Visit, shown
from warmline_run.smoke.client import BAD_REQUEST, Unanswered
from warmline_run.smoke.judge import disagreement, markup_in
from warmline_run.smoke.responses import Answer, Message, read_models

READY_POLL_S = 1.0
WITH_LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}  # most servers give as many
NEW_NAMES = ("openai/gates-a", "any/name at all")
WORD = "warm-4711"
FORCED_TOKENS_MAX = 512
STOP_WORDS = ["\n", "e", "}"]
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "List a folder.", "parameters": {"type": "object", "properties": {}}},
}


async def load(visit: Visit) -> str:
    """Waits for a model that is still loading, as long as one request may take."""
    status, listed = await visit.server.get("/models")
    names = [each["id"] for each in read_models(listed)] if status == 200 else []
    if not names:
        raise Failed(
            f"GET /v1/models answered {status} and lists no model",
            "is this the URL of an OpenAI-compatible server, with /v1?",
        )
    await _ready(visit)
    answer = await visit.server.ask(visit.opening("load", "Hello!"), max_tokens=1)
    if not answer.finish:
        raise Failed("one token was asked for, and the answer has no finish_reason")
    return f"serves {names[0]}"


async def _ready(visit: Visit) -> None:
    """Where the server has no /ready, it is taken to be."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + visit.server.timeout_s
    while True:
        status, body = await visit.server.get("//ready")
        if status != 503:
            return
        if loop.time() + READY_POLL_S > limit:
            why = json.dumps(body) if body is not None else "no reason given"
            raise Failed(
                f"GET /ready says 503: {why}", "wait until the model is loaded; the server's log says how far it is"
            )
        await asyncio.sleep(READY_POLL_S)


async def completion(visit: Visit) -> str:
    answer = await visit.server.ask(
        visit.opening("completion", "Name three large rivers."), max_tokens=visit.scale.answer_tokens
    )
    if not answer.said.strip():
        raise Failed(
            f"the answer is empty (finish_reason {answer.finish!r})",
            "look at the chat template: `warmline doctor MODEL`",
        )
    if answer.finish not in ("stop", "length"):
        raise Failed(f"finish_reason is {answer.finish!r}, not 'stop' or 'length'")
    used = answer.usage.get("completion_tokens")
    if not answer.prompt_tokens or not isinstance(used, int) or not 0 < used <= visit.scale.answer_tokens:
        raise Failed(f"usage can't be right: {json.dumps(dict(answer.usage))}")
    return f"{answer.prompt_tokens} tokens in, {used} out: {shown(answer.said, 40)}"


async def exact_answer(visit: Visit) -> str:
    messages = visit.opening("exact", "Describe the sea in a few words.")
    fields = {"max_tokens": visit.scale.answer_tokens, **WITH_LOGPROBS}
    first, second = await visit.server.ask(messages, **fields), await visit.server.ask(messages, **fields)
    if flaw := disagreement(first, second, visit.tolerance):
        raise Failed(
            f"asked twice at temperature 0, {flaw}: {shown(first.said)}, then {shown(second.said)}",
            "something is random, or the second answer was computed from a wrong cache",
        )
    return f"twice {shown(first.said, 40)}; {await forced(visit, WORD)}"


def one_value(word: str) -> dict[str, Any]:
    """A response_format that leaves the model no choice, whatever it would rather say."""
    properties = {"answer": {"type": "string", "enum": [word]}}
    schema = {"type": "object", "properties": properties, "required": ["answer"], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "one_value", "strict": True, "schema": schema}}


async def forced(visit: Visit, word: str) -> str:
    """Ask for a value that there is no choice about; what was seen.

    Raises Failed where another answer comes, NotRun where the server refuses in words.
    """
    messages = visit.opening(
        f"exact {word}", 'Answer with the JSON object {"answer": "' + word + '"} and nothing else.'
    )
    try:
        answer = await visit.server.ask(messages, max_tokens=FORCED_TOKENS_MAX, response_format=one_value(word))
    except Unanswered as error:
        if error.status != BAD_REQUEST:
            raise
        raise NotRun(f"no answer can be held to a form here: the server {error}") from None
    if only_thought(answer):
        return f"whether it can be held to one value was not seen, for it thinks for {FORCED_TOKENS_MAX} tokens or more"
    try:
        right = json.loads(answer.text) == {"answer": word}
    except ValueError:
        right = False
    if not right:
        raise Failed(
            f"response_format allows nothing but {word!r}, and the answer is {shown(answer.text or answer.reasoning)}",
            "structured output is ignored here, as mlx_lm.server does",
        )
    return "held to one value, it gives that value"


def only_thought(answer: Answer) -> bool:
    """It was cut before it came to the point: some models reason whatever they are told."""
    return answer.finish == "length" and bool(answer.reasoning) and not answer.text and not answer.calls


async def streaming(visit: Visit) -> str:
    messages = visit.opening("stream", "Describe a mountain in a few words.")
    fields = {"max_tokens": visit.scale.answer_tokens, **WITH_LOGPROBS}
    whole, streamed = await visit.server.ask(messages, **fields), await visit.server.stream(messages, **fields)
    if not streamed.ended_cleanly:
        raise Failed(
            "the stream ends without [DONE]",
            "clients take that for a broken connection, or for the end of half an answer",
        )
    if not streamed.usage:
        raise Failed("the stream has no usage, though stream_options.include_usage asked for it")
    if flaw := disagreement(whole, streamed, visit.tolerance):
        raise Failed(f"streamed and not streamed, {flaw}: {shown(whole.said)} and {shown(streamed.said)}")
    if (counts := _counts(whole)) != _counts(streamed):
        raise Failed(f"usage differs: {counts} not streamed, {_counts(streamed)} streamed")
    return f"{streamed.usage.get('completion_tokens')} tokens, the same as in one piece, then usage and [DONE]"


def _counts(answer: Answer) -> tuple[Any, ...]:
    return tuple(answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens"))


async def any_name(visit: Visit) -> str:
    for name in NEW_NAMES:
        for ask in (visit.server.ask, visit.server.stream):
            try:
                answer = await ask(visit.opening("name", "Hello!"), max_tokens=2, model=name)
            except Unanswered as error:
                raise Failed(
                    f"a request for the model {name!r} {error}",
                    "LiteLLM and agents send names of their own; this server wants its own (so does mlx_lm.server)",
                ) from None
            if answer.model != name:
                raise Failed(
                    f"asked for {name!r}, the answer calls its model {answer.model!r}",
                    "clients that check the name will refuse it",
                )
    return f"{NEW_NAMES[0]!r} and {NEW_NAMES[1]!r} are served, and come back as they were sent"


async def no_markup(visit: Visit) -> str:
    """Ends by length, by stop words and by themselves; with a system prompt, with thoughts, with tools that are off."""
    longer = 4 * visit.scale.answer_tokens
    system: Message = {"role": "system", "content": "You are brief."}
    cases: list[tuple[str, list[Message], dict[str, Any]]] = [
        ("a short answer", visit.opening("markup 1", "What is two and two?"), {"max_tokens": 3}),
        ("a longer answer", visit.opening("markup 2", "Tell a story of a fox."), {"max_tokens": longer}),
        ("stop words", visit.opening("markup 3", "Count to ten."), {"max_tokens": longer, "stop": STOP_WORDS}),
        ("a system prompt", [system, *visit.opening("markup 4", "Hello!")], {"max_tokens": longer}),
        ("thoughts", visit.opening("markup 5", "Is 91 prime?"), {"max_tokens": longer, "chat_template_kwargs": {}}),
        (
            "tools that are off",
            visit.opening("markup 6", "Look."),
            {"max_tokens": longer, "tools": [LOOK], "tool_choice": "none"},
        ),
    ]
    said = 0
    for what, messages, fields in cases:
        for ask in (visit.server.ask, visit.server.stream):
            answer = await ask(messages, **fields)
            _check_clean(what, answer, fields.get("stop", []))
            said += len(answer.said)
    if not said:
        raise NotRun("no answer said anything")
    return f"none in {2 * len(cases)} answers, {said} characters"


def _check_clean(what: str, answer: Answer, stop: list[str]) -> None:
    for part, text in (("content", answer.text), ("reasoning", answer.reasoning)):
        if found := markup_in(text):
            raise Failed(
                f"{found!r} stands in the {part} of {what}: {shown(text)}",
                "the server does not take the model's markers out; clients would show them, or send them back",
            )
    if word := next((word for word in stop if word in answer.text), ""):
        raise Failed(f"the stop word {word!r} stands in the content: {shown(answer.text)}")
