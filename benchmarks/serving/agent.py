"""An agent's session of many turns: prompt tokens computed, against the least that any cache could have computed.

On a small model with random weights (2 layers, 64 wide), Warmline's pair and `mlx_lm.server` run the same session one
after the other.  Each turn sends the whole conversation, with tools; the next one adds the answer, a call of a tool and
its result, until the prompt has `--tokens` tokens.  On the way

  a third through       the client leaves a turn in the middle of its prefill, and sends it again
  half-way              a turn goes on from the conversation as it was ten turns ago, with another result
  two thirds through    all processes are killed and started again

The least is computed from the prompts alone, rendered here with the model's own tokenizer: a turn's tokens after the
longest beginning that it shares with any earlier prompt and its answer, one at least.  What a client that left has had
computed is not new again.

Tokens computed are the pair's counter; mlx_lm.server's are the prompts without what it reports as cached, and without
the turn that was left.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/agent.py [--turns 30] [--tokens 12000]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.results import format_quartiles, make_parser, print_results, write_json
from common.servers import (
    BenchServer,
    make_text,
    open_connection,
    request_completion,
    send_completion,
    tiny_models,
)
from common.sides import read_computed_tokens, run_both
from transformers import AutoTokenizer

ANSWER_TOKENS = 24
BRANCH_TURNS = 10  # how far back the branch begins
CALL = (
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}"
    "{% endfor %}"
)
TEMPLATE = tiny_models.TEMPLATE.replace("THINK_TAIL", "").replace(
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add", f"}}}}{CALL}{{{{ '<|im_end|>\\n' }}}}{{% endfor %}}{{% if add"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "list", "delete")
]
HEADINGS = ("", "prompts", "computed", "least possible", "computed / least", "first token, median", "all turns")


class LeastCache:
    """Cache that keeps all that was ever computed: how few tokens of a prompt are left for it."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(str(model))
        self._known: list[list[int]] = []

    def count_new_tokens(self, messages: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """(tokens of the prompt, those that even this cache has to compute)."""
        prompt = self._render(messages)
        shared = max((count_shared_tokens(prompt, each) for each in self._known), default=0)
        return len(prompt), len(prompt) - min(shared, len(prompt) - 1)

    def add_answer(self, messages: Sequence[dict[str, Any]], text: str) -> None:
        answer = list(self._tokenizer.encode(text, add_special_tokens=False))
        self._known.append(self._render(messages) + answer)

    def _render(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        parsed = [parse_arguments(message) for message in messages]
        text = self._tokenizer.apply_chat_template(parsed, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def parse_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as an object, which templates expect; clients send JSON in a string."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def count_shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class AgentSession:
    """One session on one server, and what it has cost so far."""

    server: BenchServer
    cache: LeastCache
    result_tokens: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # tokens, a turn each
    least: list[int] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)  # not cached, as the server says
    ttfts_s: list[float] = field(default_factory=list)
    counted_before_restart: float = 0.0

    def begin(self) -> None:
        self.messages = [
            {"role": "system", "content": make_text(self.result_tokens, "system")},
            {"role": "user", "content": "Tidy the folder, please."},
        ]

    def run_turn(self) -> None:
        """Send the conversation, and add the answer, a call and its result."""
        prompt, least = self.cache.count_new_tokens(self.messages)
        answer = request_completion(self.server, self.messages, ANSWER_TOKENS, tools=TOOLS)
        if answer.prompt_tokens != prompt:
            raise SystemExit(f"{self.server.name} counts {answer.prompt_tokens} tokens where {prompt} were rendered")
        self.cache.add_answer(self.messages, answer.text)
        self.prompts.append(prompt)
        self.least.append(least)
        self.reported.append(prompt - answer.cached_tokens)
        self.ttfts_s.append(answer.ttft_s)
        self.add_result(answer.text, len(self.prompts))

    def add_result(self, text: str, seed: object) -> None:
        call_id = f"call_{seed}".replace(" ", "_")
        function = {"name": "read", "arguments": json.dumps({"path": f"notes/{seed}"})}
        self.messages += [
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": make_text(self.result_tokens, ("result", seed))},
        ]

    def leave_turn(self) -> None:
        """Send the conversation and disconnect after half the time of the last turn's first token."""
        connection = open_connection(self.server)
        send_completion(self.server, connection, self.messages, ANSWER_TOKENS, tools=TOOLS)
        time.sleep(self.ttfts_s[-1] / 2)
        connection.close()

    def run_branch(self) -> None:
        """One turn from BRANCH_TURNS ago, with another result; then the conversation is what it was."""
        kept = self.messages
        self.messages = kept[: max(2, len(kept) - 2 * BRANCH_TURNS)]
        self.messages[-1] = {**self.messages[-1], "content": make_text(self.result_tokens, "branch")}
        self.run_turn()
        self.messages = kept

    def restart(self, is_counted: bool) -> None:
        self.server.wait_until_saved()
        if is_counted:
            self.counted_before_restart = read_computed_tokens(self.server)
        self.server.kill_and_start()


def run_session(session: AgentSession, turns: int, is_counted: bool) -> float:
    """Prompt tokens computed, by the pair's counter or by what the server reports; one turn is the branch's."""
    before = read_computed_tokens(session.server) if is_counted else 0.0
    session.begin()
    for turn in range(turns - 1):
        if turn == turns // 3:
            session.leave_turn()
        if turn == turns // 2:
            session.run_branch()
        if turn == 2 * turns // 3:
            session.restart(is_counted)
        session.run_turn()
    if not is_counted:
        return float(sum(session.reported))
    return session.counted_before_restart - before + read_computed_tokens(session.server)


def use_template(model: Path) -> None:
    """Let the model's template render calls of tools, each prompt a beginning of the next one's."""
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))


def run(options: argparse.Namespace) -> None:
    rows, measured = [], {}
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        folder = Path(name)
        model = tiny_models.build("llama", folder / "model")
        use_template(model)
        with run_both(model, folder, has_peer=not options.no_peer) as sides:
            for server in sides.take_turns(0):
                session = AgentSession(server, LeastCache(model), options.tokens // options.turns - ANSWER_TOKENS)
                computed = run_session(session, options.turns, server is sides.pair)
                least = sum(session.least)
                rows.append(
                    [
                        server.name,
                        f"{sum(session.prompts):,}",
                        f"{computed:,.0f}",
                        f"{least:,}",
                        f"{computed / least:.3f}",
                        format_quartiles(session.ttfts_s, " s"),
                        f"{sum(session.ttfts_s):.1f} s",
                    ]
                )
                names = ("prompts", "least", "reported", "ttfts_s")
                figures = {name: getattr(session, name) for name in names}
                measured[server.name] = {"computed": computed, **figures}
                write_json(options.json, measured)
    title = f"An agent's session of {options.turns} turns, {session.prompts[-1]:,} tokens at its end, in tokens"
    print_results(
        title, HEADINGS, rows, "With one turn left and sent again, one branch and one restart; one session each."
    )


def main() -> None:
    parser = make_parser(__doc__, has_model=False)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=12_000, help="of the last prompt, about")
    options = parser.parse_args()
    if options.quick:
        options.turns, options.tokens = 12, 3_000
    run(options)


if __name__ == "__main__":
    main()
