"""Parts of prewarming: calls of files, heads of clients, what counts as stored."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.proxy.fake_backend import make_layout
from support.proxy.harness import on_loop
from warmline_common.protocol.messages import CheckpointRef, KvLayout, SegmentRef
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.prewarm.calls import PrewarmError, extract_head_fields, make_tokens_call, read_prompt_file
from warmline_proxy.prewarm.computation import PreparedPrompt, is_stored
from warmline_proxy.prewarm.heads import HEAD_BYTES_MAX, HEADS_MAX, HeadStore
from warmline_proxy.store.rows import PrefixMatch
from warmline_proxy.tasks import BackgroundTasks

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
TOOL = {"name": "run", "description": "Run it.", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "run", "description": "Run it.", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("body", "endpoint", "messages"),
    [
        ({"messages": [SYSTEM, USER], "n": 3, "max_completion_tokens": 9, "stop": "x"}, "chat", [SYSTEM, USER]),
        ({"instructions": "Be brief.", "input": "Hello", "temperature": 1}, "chat", [SYSTEM, USER]),
        ({"system": "Be brief.", "messages": [USER], "max_tokens": 9}, "chat", [SYSTEM, USER]),
        ({"messages": [USER], "tools": [ANTHROPIC_TOOL], "max_tokens": 9}, "chat", [USER]),
        ({"prompt": "Hello", "stream": True, "logprobs": 3}, "completion", None),
    ],
)
@on_loop
async def test_file_becomes_call_for_its_prompt_alone(
    tmp_path: Path, body: dict[str, Any], endpoint: str, messages: list[Any] | None
) -> None:
    (tmp_path / "body.json").write_text(json.dumps(body))
    call = await read_prompt_file(tmp_path / "body.json")
    fields = msgspec.json.decode(msgspec.json.encode(call.fields))
    assert (call.api.endpoint, call.stream, fields.pop("max_tokens")) == (endpoint, False, 1)
    assert fields.pop("messages", None) == messages
    tools = [tool["function"] for tool in fields.pop("tools", [])]
    assert tools == ([TOOL] if "tools" in body else []) and set(fields) <= {"prompt"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "there is no such file"),
        ("{", "is no body of a request: .*JSON"),
        ('{"model": "m"}', "neither 'messages' nor 'input' nor 'prompt'"),
        ('{"prompt": ["one", "two"]}', "has 2 prompts"),
        ('{"input": "x", "previous_response_id": "resp_1"}', "is no body of a request: .*resp_1"),
    ],
)
@on_loop
async def test_file_without_a_prompt_is_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "body.json").write_text(content)
    with pytest.raises(PrewarmError, match=problem):
        await read_prompt_file(tmp_path / "body.json")


def test_head_is_what_all_conversations_of_a_client_begin_with() -> None:
    body = {"messages": [SYSTEM, USER, SYSTEM], "tools": [], "tool_choice": "auto", "temperature": 1.0, "model": "m"}
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}
    assert extract_head_fields(raw) == {"messages": [SYSTEM], "tools": [], "tool_choice": "auto"}
    assert extract_head_fields({"messages": [USER]}) == {}


@on_loop
async def test_heads_are_bounded_private_and_forgotten(tmp_path: Path) -> None:
    home, background = Home(tmp_path), BackgroundTasks()
    store = HeadStore(home, background)

    def record(name: str, text: str, entry: str = "client") -> bool:
        tools = [{"type": "function", "function": {**TOOL, "name": name}}]
        return store.record(entry, {"messages": [{"role": "system", "content": text}, USER], "tools": tools})

    def list_texts(heads: HeadStore = store) -> list[str]:
        return [head["messages"][0]["content"] for head in heads.list_heads("client")]

    assert record("helper", "old") and record("agent", "one") and not record("agent", "one") and record("agent", "two")
    assert list_texts() == ["two", "old"], "the last seen of each set of tools"
    assert all(record(f"tool {number}", "x", entry) for number in range(HEADS_MAX) for entry in ("client", "gone"))
    assert len(list_texts()) == HEADS_MAX and "old" not in list_texts()
    assert not record("agent", "x" * HEAD_BYTES_MAX)
    await background.drain(5.0)
    assert home.prompt_heads.stat().st_mode & 0o777 == 0o600 and home.prewarm.stat().st_mode & 0o777 == 0o700

    again = HeadStore(home, background)
    again.load(["client"])
    assert list_texts(again) == list_texts() and b"gone" not in home.prompt_heads.read_bytes()
    again.clear()
    assert not home.prompt_heads.exists() and not list_texts(again), "at once: the purge answers then"
    await asyncio.sleep(0)
    await background.drain(5.0)
    assert not home.prompt_heads.exists()
    home.prompt_heads.write_bytes(b"?")
    again.load(["client"])
    assert not home.prompt_heads.exists()


def make_match(tokens: int, *checkpoints: int) -> PrefixMatch:
    """Match of tokens that are stored in files of 60 tokens."""
    starts = range(0, tokens, 60)
    chain = [SegmentRef(id="", start=at, end=at + 60, upto=min(tokens, at + 60)) for at in starts]
    states = [CheckpointRef(id="", position=position) for position in checkpoints]
    return PrefixMatch(tokens=tokens, chain=chain, checkpoints=states, end_reason="")


STATES, EXACT = make_layout(has_states=True), make_layout(grid=32)


@pytest.mark.parametrize(
    ("layout", "is_head", "turn_end", "match", "expected"),
    [
        (make_layout(), True, 0, make_match(100), True),
        (make_layout(), True, 0, make_match(99), False),
        (make_layout(), False, 90, make_match(99), True),  # its last token is computed in any case
        (make_layout(), False, 90, make_match(90), False),
        (STATES, True, 0, make_match(100, 100), True),
        (STATES, True, 0, make_match(100, 90), False),
        (STATES, False, 90, make_match(100, 90), True),
        (STATES, False, 90, make_match(100, 60), False),
        (STATES, False, 0, make_match(100, 100), True),  # a completion has no turn
        (EXACT, True, 0, make_match(96), True),
        (EXACT, True, 0, make_match(64), False),
    ],
)
def test_prompt_is_stored_where_requests_can_start_from_it(
    layout: KvLayout, is_head: bool, turn_end: int, match: PrefixMatch, expected: bool
) -> None:
    tokens = list(range(100))
    prompt = PreparedPrompt(make_tokens_call(tokens), b"root", pack_tokens(tokens), turn_end, is_head, layout)
    assert is_stored(prompt, match) == expected
