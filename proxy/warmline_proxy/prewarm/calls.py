"""Calls whose prompts are computed ahead: read from files with requests' bodies, made of heads, made of token ids."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from warmline_common.storage import disk
from warmline_proxy.api.base import Api, ApiCall, Fields
from warmline_proxy.api.chat_messages import decode_as, decode_elements
from warmline_proxy.api.registry import CHAT, COMPLETION, MESSAGES, RESPONSES
from warmline_proxy.errors import ClientError, decode_error_body
from warmline_proxy.explain.prompt_head import INSTRUCTION_ROLES
from warmline_proxy.http import body_fields
from warmline_proxy.http.bodies import BODY_BYTES_MAX
from warmline_proxy.response.choices import split_choices

APIS: Mapping[str, Api] = {"chat": CHAT, "completions": COMPLETION, "responses": RESPONSES, "messages": MESSAGES}
# Fields of the internal form that a prompt depends on; the others are about the answer, which is not wanted.
HEAD_FIELDS = (
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("reasoning_effort", "reasoning", "thinking", "think", "enable_thinking"),
)
PROMPT_FIELDS = ("messages", "prompt", "add_generation_prompt", "continue_final_message", *HEAD_FIELDS)
ONE_TOKEN: Fields = {"max_tokens": 1}  # the least that can be asked for; it is dropped
PLACEHOLDER = {"role": "user", "content": "a"}  # some templates refuse a conversation without a user


class PrewarmError(Exception):
    """Reason why a prompt can't be computed ahead, for people."""


async def read_prompt_file(path: Path, api_name: str = "") -> ApiCall:
    """Call for the prompt of a request's body in a file.  Raises PrewarmError."""
    try:
        body = await asyncio.to_thread(_read_body, path)
        raw = body_fields.parse_object(body)
        api = APIS[api_name or guess_api(raw)]
        call = await api.read_call(body, {})
        choices = split_choices(api.endpoint, _select_fields(call.fields, PROMPT_FIELDS))
    except FileNotFoundError:
        raise PrewarmError(f"{path}: there is no such file; give one with the JSON body of a request") from None
    except OSError as error:
        raise PrewarmError(f"{path} can't be read: {error.strerror or error}") from None
    except ClientError as error:
        raise PrewarmError(f"{path} is no body of a request: {decode_error_body(error).message}") from None
    if len(choices) > 1:
        raise PrewarmError(f"{path} has {len(choices)} prompts: give each a file of its own")
    return replace(call, fields=choices[0].fields | ONE_TOKEN, stream=False)


def guess_api(body: Mapping[str, Any]) -> str:
    """Name of the API that a body was written for.  Raises PrewarmError."""
    if "input" in body:
        return "responses"
    if "messages" in body:
        tools = decode_as(body.get("tools"), list) or ()
        is_anthropic = "system" in body or any(isinstance(tool, dict) and "input_schema" in tool for tool in tools)
        return "messages" if is_anthropic else "chat"
    if "prompt" in body:
        return "completions"
    raise PrewarmError("the body has neither 'messages' nor 'input' nor 'prompt': it is none of the served APIs'")


def extract_head_fields(fields: Mapping[str, Any]) -> Fields:
    """Fields of a chat body that shape the head of its prompt, decoded: leading system messages, tools, options.

    Empty where it has neither system messages nor tools.
    """
    system = []
    for message in decode_elements(fields.get("messages")):
        if (read := decode_as(message, dict)) is None or read.get("role") not in INSTRUCTION_ROLES:
            break
        system.append(read)
    options = {name: decode_as(value, object) for name, value in _select_fields(fields, HEAD_FIELDS).items()}
    return {"messages": system, **options} if system or options.get("tools") else {}


def make_head_call(head: Fields) -> ApiCall:
    """Call whose prompt begins with this head, and goes on with a user's message that is to be cut off."""
    return _make_call(CHAT, {**head, "messages": [*head["messages"], PLACEHOLDER]})


def make_tokens_call(tokens: Sequence[int]) -> ApiCall:
    """Call whose prompt is these token ids."""
    return _make_call(COMPLETION, {"prompt": list(tokens)})


def _make_call(api: Api, fields: Fields) -> ApiCall:
    return ApiCall(api=api, fields=fields | ONE_TOKEN, client_model=None, stream=False, session_hint="")


def _select_fields(fields: Mapping[str, Any], names: Sequence[str]) -> Fields:
    return {name: fields[name] for name in names if name in fields}


def _read_body(path: Path) -> bytes:
    with BufferedReader(disk.open_to_read(path)) as file:
        body = file.read(BODY_BYTES_MAX + 1)
    if len(body) > BODY_BYTES_MAX:
        raise PrewarmError(f"{path} is larger than {BODY_BYTES_MAX >> 20} MiB, more than a request's body may be")
    return body
