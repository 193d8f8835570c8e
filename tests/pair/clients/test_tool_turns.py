"""Agents that reason and call tools: each turn starts from the end of the last one, however its answer is changed.

The template opens the model's reasoning in the generation prompt, and leaves it out of what was said before the last
user spoke.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.pair import FolderOf, Pair, Reply
from warmline_common.protocol.messages import PromptReply, PromptRequest, decode, encode

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LONG = "Look closely, and leave nothing out. "
REPEATED = {"llama": 40, "falcon_h1": 40, "qwen3_5": 12}  # so that on no machine it is computed sooner than read
RESULT = "bin\netc\nhome\nopt\nsrv\nusr"
# By family (rows only; states beside rows, in each layer and in layers of their own): the template's manners.
FAMILIES = {"llama": ["marked", "open"], "falcon_h1": ["marked"], "qwen3_5": ["open"]}


class ToolAgent:
    """Conversation of an agent, each turn of which is sent once the last one is on disk."""

    def __init__(self, pair: Pair, manner: str, first: str) -> None:
        self.pair = pair
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
        self.options: dict[str, Any] = {"tools": [LOOK], "chat_template_kwargs": {"manner": manner}}

    def ask(self) -> Reply:
        reply = self.pair.chat(self.messages, max_tokens=8, **WITH_LOGPROBS, **self.options)
        self.pair.settle()
        return reply

    @property
    def rendered_prompt(self) -> PromptReply:
        body = {"messages": self.messages, **self.options}
        request = encode(PromptRequest(request_id="test", endpoint="chat", body=body))
        return decode(self.pair.as_owner("POST", self.pair.backend_url + "/kv/prompts", request).raw, PromptReply)

    def append_call(self, content: str, arguments: str, **fields: str) -> None:
        """Append the model's answer as its client makes a tool call of it, and the tool's result."""
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        self.messages.append({"role": "assistant", "content": content, "tool_calls": [call], **fields})
        self.messages.append({"role": "tool", "tool_call_id": "1", "content": RESULT})

    def reserialize(self) -> None:
        """Write the calls anew as a client does that keeps them parsed, with other white space than before."""
        for message in self.messages:
            for call in message.get("tool_calls", ()):
                arguments, spaced = call["function"]["arguments"], ": " in call["function"]["arguments"]
                call["function"]["arguments"] = json.dumps(
                    json.loads(arguments), separators=(",", ":") if spaced else (", ", ": ")
                )

    def append_answer(self, content: str, question: str) -> None:
        self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": question}]


def check_next_turn(agent: ToolAgent, before: int) -> Reply:
    """Ask the next turn; it starts at the end of the turn before, or later."""
    reply = agent.ask()
    assert reply.cached >= before, f"{reply.cached} of {before} tokens: {agent.pair.perf_line(reply)}"
    return reply


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_loop_turns_start_from_previous_turn(family: str, tiny_folder: FolderOf, tmp_path: Path) -> None:
    opening = LONG * REPEATED[family]
    with Pair(tmp_path, tiny_folder(family, tools=True)) as pair:
        agents = [
            ToolAgent(pair, manner, f"What lies in the root folder ({manner})? {opening}")
            for manner in FAMILIES[family]
        ]
        for agent in agents:
            check_tool_loop(agent)
        pair.kill()
        pair.start()
        for agent in agents:
            check_turns_after_restart(agent)
            check_omitted_reasoning(agent)


def check_tool_loop(agent: ToolAgent) -> None:
    reply = agent.ask()
    before = agent.rendered_prompt.turn_end
    agent.append_call("", '{"path": "/"}', reasoning_content=reply.reasoning)
    reply, before = check_next_turn(agent, before), agent.rendered_prompt.turn_end
    agent.append_call("", '{"path":"/bin","deep":true}')  # its reasoning has gone
    agent.reserialize()
    reply, before = check_next_turn(agent, before), agent.rendered_prompt.turn_end
    agent.append_call(f"<think>\n{reply.reasoning}\n</think>\n\nThere.", '{"path": "/etc"}')
    agent.reserialize()
    check_next_turn(agent, before)


def check_turns_after_restart(agent: ToolAgent) -> None:
    before = agent.rendered_prompt.turn_end
    agent.append_call("", '{"path": "/home"}', reasoning_content="Once more.")
    reply, before = check_next_turn(agent, before), agent.rendered_prompt.turn_end
    cold = agent.pair.ask_backend(agent.messages, max_tokens=8, **WITH_LOGPROBS, **agent.options)
    assert not explain_difference(cold, reply)
    agent.append_call("", '{"path": "/opt"}', reasoning_content="And again.")
    check_next_turn(agent, before)


def check_omitted_reasoning(agent: ToolAgent) -> None:
    """Check the turn after the user speaks again: it differs where the template first omits reasoning."""
    message_end = next(message.end for message in agent.rendered_prompt.messages if message.number == 1)
    before = agent.rendered_prompt.turn_end
    agent.append_answer("Six folders.", "And what lies in /usr?")
    reply = agent.ask()
    where = r"at token (\d+), in message 2 \(assistant\): the template leaves out its reasoning"
    why = re.search(f"differs from what is (?:in memory|stored) {where}", line := agent.pair.perf_line(reply))
    assert why, line
    has_states = "no checkpoint after" in line
    assert reply.cached == (message_end if has_states else int(why[1])) < before, "the longest prefix that is the same"
    cold = agent.pair.ask_backend(agent.messages, max_tokens=8, **WITH_LOGPROBS, **agent.options)
    assert not explain_difference(cold, reply)
    before = agent.rendered_prompt.turn_end
    agent.append_call("", '{"path": "/usr"}', reasoning_content=reply.reasoning)
    check_next_turn(agent, before)
