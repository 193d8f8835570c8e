"""`--reuse exact`: a warm answer's log-probabilities equal a cold one's to the last bit.

The backend without the proxy computes cold, by the rules of exact mode.  `warmline serve` preloads OpenBLAS, under
which other chunks, or KV computed while decoding, would show: the reference BLAS gives the same bits for any shape.
"""

from pathlib import Path
from typing import Any

from support.pair.pair import FolderOf, Message, Pair
from warmline_common.protocol.tokens import count_common_tokens
from warmline_run import openblas

GRID = 64
ALL = {"logprobs": True, "top_logprobs": 20, "max_tokens": 12}
TURNS = 6
KILLED_BEFORE = 3
WORDS = "Go on from there, and say what became of them in the end, once the storm was over and the boats were back. "


def ask_cold(pair: Pair, messages: list[Message]) -> tuple[Any, str]:
    """Ask the backend directly for cold numbers and text."""
    reply = pair.ask_backend(messages, **ALL)
    return reply.json["choices"][0]["logprobs"], reply.text


def compute_kv_end(tokens: int) -> int:
    """Compute the end of the KV that a prompt of so many tokens leaves."""
    return (tokens - 1) // GRID * GRID


def test_warm_logprobs_equal_cold_in_exact_mode(tiny_folder: FolderOf, tmp_path: Path) -> None:
    """Other cache families in exact mode: tests/oracle, on pairs, and exact_cases.py, without processes."""
    flags = ("--reuse", "exact", "--prefill-step-size", str(GRID))
    with Pair(tmp_path, tiny_folder("qwen3_5"), *flags) as pair:
        if openblas.is_openblas_needed() and openblas.find_library():
            assert "openblas" in Path(f"/proc/{pair.pid('backend')}/maps").read_text()
        # Long enough that restoring is sooner than computing, however fast this machine is today.
        messages: list[Message] = [{"role": "user", "content": f"Tell me of the sea. {5 * WORDS}"}]
        expected = 0
        for turn in range(TURNS):
            if turn == KILLED_BEFORE:
                pair.kill()
                pair.start()
            reply = pair.chat(messages, **ALL)
            assert reply.cached == expected, pair.perf_line(reply)
            assert (reply.json["choices"][0]["logprobs"], reply.text) == ask_cold(pair, messages), f"turn {turn}"
            expected = compute_kv_end(reply.prompt_tokens)
            pair.settle()
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": WORDS}]
        check_regenerate_and_edit(pair, messages[:-2])
        assert pair.cachectl("verify", "--deep")["findings"] == []


def check_regenerate_and_edit(pair: Pair, messages: list[Message]) -> None:
    """Check the last turn once more, and then with an earlier message edited."""
    again = pair.chat(messages, **ALL)
    assert again.cached == compute_kv_end(again.prompt_tokens)
    assert f"exact mode keeps and reuses multiples of {GRID} tokens" in pair.perf_line(again)
    assert (again.json["choices"][0]["logprobs"], again.text) == ask_cold(pair, messages)
    edited = [*messages[:3], {"role": "assistant", "content": "No."}, *messages[4:]]
    shared = count_common_tokens(pair.render_prompt(messages).tokens, pair.render_prompt(edited).tokens)
    reply = pair.chat(edited, **ALL)
    assert 0 < reply.cached <= shared and reply.cached % GRID == 0
    assert reply.cached >= compute_kv_end(shared) - GRID, "states are kept at the last place of each turn"
    assert (reply.json["choices"][0]["logprobs"], reply.text) == ask_cold(pair, edited)
