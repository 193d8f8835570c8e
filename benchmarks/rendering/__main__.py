"""Rendering of a conversation's next turn: all of its text tokenized again, and the new part alone.

The demo model's tokenizer and template; messages are pieces of Python files.  Both sides take turns: before each
rendering, one forgets all texts, the other knows the last turn's.  CPU time of the process, medians.

Usage: .venv/bin/python benchmarks/rendering [--tokens 2000,20000,177000] [--message-tokens 1000] [--rounds 9]
       [--json FILE] [--quick]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import load
from rich.console import Console

from warmline_backend import demo
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_common.protocol.messages import PromptReply, PromptRequest, decode, encode
from warmline_common.protocol.tokens import pack_tokens

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from common.results import make_parser, write_json  # noqa: E402
from common.rows import StreamingTable  # noqa: E402

Message = dict[str, str]
COLUMNS = {"tokens": 8, "messages": 8, "all ms": 8, "new ms": 8, "ratio": 7, "decode ms": 9, "reply ms": 8}


def make_renderer() -> TemplateRenderer:
    _, facts = mx.load(str(demo.find_gguf_file()), return_metadata=True)
    with tempfile.TemporaryDirectory() as folder:
        demo._write_tokenizer(Path(folder), facts)
        return TemplateRenderer(load(Path(folder)))


def make_conversation(renderer: TemplateRenderer, tokens: int, message_tokens: int) -> list[Message]:
    """A system message, then users' and assistants' in turn; a user's is the last."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "backend").rglob("*.py")))
    chars = message_tokens * 100_000 // len(renderer._text_tokenizer.encode(source[:100_000]))
    number = max(1, tokens // message_tokens) // 2 * 2 + 1
    starts = (index * chars % (len(source) - chars) for index in count())
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    for index, start in zip(range(number), starts, strict=False):
        messages.append({"role": ("user", "assistant")[index % 2], "content": source[start : start + chars]})
    return messages


def time_cpu_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = work()
    return 1000 * (time.process_time() - began), result


def measure_turn(renderer: TemplateRenderer, messages: list[Message], rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and the prompt's size."""
    times: dict[str, list[float]] = {"all": [], "new": [], "decode": [], "reply": []}
    tokens = 0
    for number in range(rounds):
        answer = {"role": "assistant", "content": f"The {number}th file imports it."}
        later = [*messages, answer, {"role": "user", "content": f"And where is its caller {number}?"}]
        for side in ("all", "new") if number % 2 else ("new", "all"):
            renderer.clear_cache()
            if side == "new":
                renderer.render("chat", {"messages": messages})
            taken, rendered = time_cpu_ms(lambda: renderer.render("chat", {"messages": later}))  # noqa: B023
            times[side].append(taken)
        raw = encode(PromptRequest(request_id="r", endpoint="chat", body={"messages": later}))
        times["decode"].append(time_cpu_ms(lambda: decode(raw, PromptRequest))[0])  # noqa: B023
        times["reply"].append(time_cpu_ms(lambda: encode_reply(rendered))[0])  # noqa: B023
        tokens = len(rendered.tokens)
    medians = {side: statistics.median(each) for side, each in times.items()}
    return {"tokens": tokens, "messages": len(messages) + 2, **medians}


def encode_reply(rendered: Any) -> bytes:
    return encode(
        PromptReply(
            boot="b",
            generation=0,
            prompt_id="p",
            tokens=pack_tokens(rendered.tokens),
            boundaries=rendered.boundaries,
            turn_end=rendered.turn_end,
            messages=rendered.messages,
            tokens_max=1,
            fingerprint="f",
        )
    )


def main() -> None:
    parser = make_parser(__doc__, has_model=False, has_peer=False)
    parser.add_argument("--tokens", default="2000,20000,177000", help="lengths of the conversation, about")
    parser.add_argument("--message-tokens", type=int, default=1000, help="length of a message, about")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = "2000", 1
    renderer = make_renderer()
    table, rows = StreamingTable(Console(), "next turn, CPU time, medians", COLUMNS), []
    for tokens in map(int, options.tokens.split(",")):
        messages = make_conversation(renderer, tokens, options.message_tokens)
        row = measure_turn(renderer, messages, options.rounds)
        rows.append(row)
        times = [f"{row[side]:.1f}" for side in ("all", "new")]
        ratio, rest = f"{row['all'] / row['new']:.1f}", [f"{row[side]:.1f}" for side in ("decode", "reply")]
        table.add_row(str(row["tokens"]), str(row["messages"]), *times, ratio, *rest)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
