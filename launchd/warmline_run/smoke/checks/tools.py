"""Checks of tool calls: a required call comes, valid, and its result is read."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from warmline_run.smoke.check import CheckFailedError, CheckNotRunError, Target, format_excerpt, read_cached_tokens
from warmline_run.smoke.checks.basic import has_only_reasoning
from warmline_run.smoke.client import BAD_REQUEST, NoAnswerError
from warmline_run.smoke.judge import find_argument_flaw
from warmline_run.smoke.responses import ChatCompletion, Message

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
TOOL_FIELDS: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False}
CALL_TOKENS_MAX = 512
TAIL_TOKENS = 64  # at a prompt's end, that open the answer: a template may write them otherwise next turn
QUESTION = "How is this machine called? Read it from its file. " + "Take your time, and look before you answer. " * 12


async def check_tool_call(target: Target) -> str:
    messages = target.make_messages("tool", QUESTION)
    for mode_suffix, ask in (("", target.client.complete), (" (streamed)", target.client.stream)):
        arguments = validate_tool_call(await _request_required_call(ask, messages), mode_suffix)
    return f"{TOOL}({json.dumps(arguments)}), streamed and not"


async def _request_required_call(
    ask: Callable[..., Awaitable[ChatCompletion]], messages: list[Message]
) -> ChatCompletion:
    """Answer to a request that requires a call.  Raises CheckNotRunError where the server refuses it in words."""
    try:
        return await ask(messages, max_tokens=CALL_TOKENS_MAX, tool_choice="required", **TOOL_FIELDS)
    except NoAnswerError as error:
        if error.status != BAD_REQUEST:
            raise
        raise CheckNotRunError(f"no call can be required of this model here: the server {error}") from None


def validate_tool_call(answer: ChatCompletion, mode_suffix: str = "") -> Mapping[str, Any]:
    """Arguments of the answer's one call, which must be right in all parts.  Raises CheckFailedError."""
    if has_only_reasoning(answer):
        raise CheckNotRunError(f"the model thinks for {CALL_TOKENS_MAX} tokens or more before it calls")
    if not answer.tool_calls:
        raise CheckFailedError(
            f"a call is required, and the answer{mode_suffix} has none: finish_reason "
            f"{answer.finish_reason!r}, {format_excerpt(answer.full_text)}",
            "the server ignores tool_choice (mlx_lm.server does), or can't read this model's calls",
        )
    for call in answer.tool_calls:
        function = call.get("function")
        if not call.get("id") or not isinstance(function, Mapping) or function.get("name") != TOOL:
            raise CheckFailedError(
                f"not a call{mode_suffix} of the one tool that there is: {json.dumps(dict(call))[:200]}"
            )
        try:
            arguments: Any = json.loads(function.get("arguments", ""))
        except (TypeError, ValueError):
            raise CheckFailedError(
                f"its arguments{mode_suffix} are no JSON: {format_excerpt(str(function.get('arguments')))}"
            ) from None
        if flaw := find_argument_flaw(arguments, SCHEMA):
            raise CheckFailedError(
                f"its arguments{mode_suffix} don't follow the schema: {flaw}",
                "the server does not hold calls to their schema",
            )
    if answer.finish_reason != "tool_calls":
        raise CheckFailedError(
            f"finish_reason{mode_suffix} is {answer.finish_reason!r}, not 'tool_calls'",
            "agents would not look for the call",
        )
    return arguments  # type: ignore[no-any-return]


async def check_tool_result(target: Target) -> str:
    messages = target.make_messages("result", QUESTION)
    call_answer = await _request_required_call(target.client.complete, messages)
    try:
        validate_tool_call(call_answer)
    except CheckFailedError:
        raise CheckNotRunError("no right call came that could be answered: see tool-call") from None
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": "harbour-7"} for call in call_answer.tool_calls
    ]
    answer = await target.complete([*messages, call_answer.message, *results], **TOOL_FIELDS)
    if not answer.full_text.strip() and not answer.tool_calls:
        raise CheckFailedError(f"the answer to the tool's result is empty (finish_reason {answer.finish_reason!r})")
    question_tokens, prompt_tokens = call_answer.prompt_tokens, answer.prompt_tokens
    if prompt_tokens <= question_tokens:
        raise CheckFailedError(
            f"with call and result the prompt has {prompt_tokens} tokens, without them {question_tokens}",
            "the model did not see them: look at its chat template with `warmline doctor MODEL`",
        )
    target.require_step(question_tokens, slack=TAIL_TOKENS)
    cached = read_cached_tokens(answer)
    if cached < target.expected_cached_tokens(question_tokens, slack=TAIL_TOKENS):
        raise CheckFailedError(
            f"{cached} tokens were reused of the {question_tokens} before the call",
            "each step of an agent would prefill anew; the server's log, or `cachectl stats`, says why",
        )
    return f"answered; {cached} of its {prompt_tokens} tokens were reused, the call's question had {question_tokens}"
