"""Gates of tool calls: a call that is asked for comes, valid; what becomes of its result."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from warmline_run.smoke.check import Failed, NotRun, Visit, shown
from warmline_run.smoke.checks.basic import only_thought
from warmline_run.smoke.client import BAD_REQUEST, Unanswered
from warmline_run.smoke.judge import argument_flaw
from warmline_run.smoke.responses import Answer, Message

TOOL = "read_lines"
# Bounded values: a model that is free to write a string may never end it.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "enum": ["/etc/hostname", "/etc/os-release"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "numbered": {"type": "boolean"},
    },
    "required": ["path", "count", "numbered"],
    "additionalProperties": False,
}
FUNCTION = {"name": TOOL, "description": "Read the first lines of a file.", "parameters": SCHEMA, "strict": True}
# One call: a small model that may call again and again does so until it is cut.
ASKING: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False}
CALL_TOKENS_MAX = 512
TAIL_TOKENS = 64  # at a prompt's end, that open the answer: a template may write them otherwise next turn
QUESTION = "How is this machine called? Read it from its file. " + "Take your time, and look before you answer. " * 12


async def tool_call(visit: Visit) -> str:
    messages = visit.opening("tool", QUESTION)
    for how, ask in (("", visit.server.ask), (" (streamed)", visit.server.stream)):
        arguments = check_call(await _required(ask, messages), how)
    return f"{TOOL}({json.dumps(arguments)}), streamed and not"


async def _required(ask: Callable[..., Awaitable[Answer]], messages: list[Message]) -> Answer:
    """The answer to a request that must be answered by a call.  Raises NotRun where the server refuses it in words."""
    try:
        return await ask(messages, max_tokens=CALL_TOKENS_MAX, tool_choice="required", **ASKING)
    except Unanswered as error:
        if error.status != BAD_REQUEST:
            raise
        raise NotRun(f"no call can be required of this model here: the server {error}") from None


def check_call(answer: Answer, how: str = "") -> Mapping[str, Any]:
    """The arguments of its one call, which must be right in all its parts.  Raises Failed."""
    if only_thought(answer):
        raise NotRun(f"the model thinks for {CALL_TOKENS_MAX} tokens or more before it calls")
    if not answer.calls:
        raise Failed(
            f"a call is required, and the answer{how} has none: finish_reason {answer.finish!r}, {shown(answer.said)}",
            "the server ignores tool_choice (mlx_lm.server does), or can't read this model's calls",
        )
    for call in answer.calls:
        function = call.get("function")
        if not call.get("id") or not isinstance(function, Mapping) or function.get("name") != TOOL:
            raise Failed(f"not a call{how} of the one tool that there is: {json.dumps(dict(call))[:200]}")
        try:
            arguments: Any = json.loads(function.get("arguments", ""))
        except (TypeError, ValueError):
            raise Failed(f"its arguments{how} are no JSON: {shown(str(function.get('arguments')))}") from None
        if flaw := argument_flaw(arguments, SCHEMA):
            raise Failed(
                f"its arguments{how} don't follow the schema: {flaw}", "the server does not hold calls to their schema"
            )
    if answer.finish != "tool_calls":
        raise Failed(f"finish_reason{how} is {answer.finish!r}, not 'tool_calls'", "agents would not look for the call")
    return arguments  # type: ignore[no-any-return]


async def tool_result(visit: Visit) -> str:
    messages = visit.opening("result", QUESTION)
    asked = await _required(visit.server.ask, messages)
    try:
        check_call(asked)
    except Failed:
        raise NotRun("no right call came that could be answered: see tool-call") from None
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": "harbour-7"} for call in asked.calls
    ]
    answer = await visit.server.ask(
        [*messages, asked.message, *results], max_tokens=visit.scale.answer_tokens, **ASKING
    )
    if not answer.said.strip() and not answer.calls:
        raise Failed(f"the answer to the tool's result is empty (finish_reason {answer.finish!r})")
    if answer.prompt_tokens <= asked.prompt_tokens:
        raise Failed(
            f"with call and result the prompt has {answer.prompt_tokens} tokens, without them {asked.prompt_tokens}",
            "the model did not see them: look at its chat template with `warmline doctor MODEL`",
        )
    return f"answered; {_reuse(visit, asked, answer)}"


def _reuse(visit: Visit, asked: Answer, answer: Answer) -> str:
    cached, wanted = answer.cached_tokens, visit.kept(asked.prompt_tokens, TAIL_TOKENS)
    if cached is None:
        raise Failed("usage does not say how much was reused (prompt_tokens_details.cached_tokens)")
    if cached < wanted:
        raise Failed(
            f"{cached} tokens were reused of the {asked.prompt_tokens} before the call",
            "each step of an agent would prefill anew; the server's log, or `cachectl stats`, says why",
        )
    return f"{cached} of its {answer.prompt_tokens} tokens were reused, the call's question had {asked.prompt_tokens}"
