"""Restart after kill -9 with a draft model: the next turn drafts at once, and computes its new tokens alone."""

import json
from pathlib import Path

import pytest

from support.metrics_text import MetricsText
from support.pair.answers import TOLERANCE, WITH_LOGPROBS, explain_difference
from support.pair.pair import FolderOf, Message, Pair, send_request
from support.pair.waiting import wait_until
from support.speculation.draft_models import build_inexact_copy
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens

ANSWER = {"max_tokens": 40, "ignore_eos": True, **WITH_LOGPROBS}


def make_drafts_cheap(pair: Pair) -> None:
    """Replace what passes of these two tiny models were measured to cost: drafts of the one would not pay."""
    path = pair.home.models / "pass_costs.json"
    costs = json.loads(path.read_text())
    drafting = [key for key in costs if " draft " in key]
    assert len(drafting) == 1 and len(costs) == 2
    for key, pairs in costs.items():
        costs[key] = [[1, 0.001]] if key in drafting else [[width, 0.01] for width, _ in pairs]
    path.write_text(json.dumps(costs))


def read_metric(pair: Pair, name: str) -> float:
    text = send_request(f"{pair.backend_url}/metrics", None, {}, "GET").raw.decode()
    return MetricsText(text).total(f"warmline_backend_draft_tokens{name}", source="draft_model")


def test_conversation_drafts_at_once_after_kill(tiny_folder: FolderOf, tmp_path: Path) -> None:
    model = tiny_folder("llama")
    draft = build_inexact_copy(model, tmp_path / "draft", 0.01)
    pair = Pair(tmp_path / "home", model, "--draft-model", str(draft))
    messages: list[Message] = [{"role": "user", "content": "Which animals live in the sea, and which are fish?"}]
    with pair:
        messages.append({"role": "assistant", "content": pair.chat(messages, **ANSWER).text})
        pair.settle()
        held = pair.longest_resident()
        pair.kill()
    make_drafts_cheap(pair)
    messages.append({"role": "user", "content": "And which of them are mammals?"})
    with pair:
        prompt = pair.render_prompt(messages).tokens
        warm = pair.chat(messages, **ANSWER)
        repeated = min(count_common_tokens(held, prompt), len(prompt) // TOKEN_BYTES - 1)
        assert warm.cached == repeated and warm.headers["X-Warmline-Cache"] == f"restored {repeated}"
        new = len(prompt) // TOKEN_BYTES - repeated
        assert f" prefilled={new} " in pair.perf_line(warm), "neither model computes more than the new tokens"
        request_id = warm.headers["X-Warmline-Request"]
        wait_until(lambda: any(each["id"] == request_id for each in pair.requests()), "the request is not recorded")
        record = next(each for each in pair.requests() if each["id"] == request_id)
        assert record["decode_passes"] < 20, "several tokens a pass, from the first on"
        drafted, accepted = (read_metric(pair, name) for name in ("_total", "_accepted_total"))
        assert 20 < accepted <= record["accepted_tokens"] and accepted <= drafted <= record["drafted_tokens"]
        cold = pair.ask_backend(messages, **ANSWER)
        assert explain_difference(cold, warm, TOLERANCE) == ""


def test_draft_model_that_does_not_fit_ends_the_start(tiny_folder: FolderOf, tmp_path: Path) -> None:
    draft = build_inexact_copy(tiny_folder("llama"), tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    pair = Pair(tmp_path / "home", tiny_folder("llama"), "--draft-model", str(draft))
    with pytest.raises(AssertionError):
        pair.start()
    output = "\n".join(pair.log)
    assert f"can't serve {tiny_folder('llama')}: --draft-model {draft}: its tokenizer is another one" in output
    assert "'a' is 65, not 64; 'b' is 64, not 65" in output
