"""Sampled tool calls are found again when their client sends them back rewritten, even after a SIGKILL."""

import json
import shutil
from pathlib import Path
from typing import Any

from support.pair.pair import FolderOf, Pair, Reply

# What a random model can fill in; in another order than the template's, which is that of the client's object.
PARAMETERS = {
    "zone": {"enum": ["north", "south"]},
    "deep": {"type": "boolean"},
    "area": {"enum": ["here", "there"]},
}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": PARAMETERS,
            "required": list(PARAMETERS),
            "additionalProperties": False,
        },
    },
}
# Closes the reasoning before the answer begins, there and in what was said; calls are JSON.
TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + ('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') + m.content }}
    {%- for tool_call in m.tool_calls or [] %}
        {%- set tool_call = tool_call.function %}
        {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
        {{- tool_call.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}
"""
QUESTION = "What lies around? " + "Look closely, and leave nothing out. " * 12


class ParsingAgent:
    """Agent that sends calls back as a client does that keeps them parsed."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]

    def ask(self) -> Reply:
        reply = self.pair.post(
            "/v1/chat/completions",
            {
                "messages": self.messages,
                "tools": [LOOK],
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "max_tokens": 300,
            },
        )
        assert reply.status == 200, reply.raw
        self.pair.settle()
        return reply

    def append_call(self, reply: Reply, **changed: Any) -> None:
        """Append the model's call, with arguments in alphabetical order, and a result."""
        message = reply.json["choices"][0]["message"]
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"]) | changed
        function = {"name": "look", "arguments": json.dumps(arguments, sort_keys=True, separators=(" ,", " :"))}
        kept = {"id": call["id"], "type": "function", "function": function}
        self.messages += [
            {"role": "assistant", "content": message["content"] or "", "tool_calls": [kept]}
            | ({"reasoning_content": thought} if (thought := message.get("reasoning_content")) else {}),
            {"role": "tool", "tool_call_id": call["id"], "content": "hills"},
        ]


def list_turn_tokens(reply: Reply) -> int:
    """List the prompt and all sampled tokens but the end of the answer."""
    return reply.prompt_tokens + int(reply.json["usage"]["completion_tokens"])


def test_replayed_call_equals_sampled_tokens(tiny_folder: FolderOf, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    with Pair(tmp_path / "home", folder) as pair:
        agent = ParsingAgent(pair)
        first = agent.ask()
        agent.append_call(first)
        second = agent.ask()
        assert second.cached == list_turn_tokens(first), pair.perf_line(second)
        agent.append_call(second)
        pair.kill()
        pair.start()
        third = agent.ask()
        assert third.cached == list_turn_tokens(second), pair.perf_line(third)
        agent.append_call(third, deep="other")
        fourth = agent.ask()
        assert third.prompt_tokens <= fourth.cached < list_turn_tokens(third), (
            "the model did not sample these arguments"
        )
