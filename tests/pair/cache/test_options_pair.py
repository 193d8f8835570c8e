"""Model settings at the start, over one real pair: template arguments, sampling, code of the model."""

import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import tiny_models
from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.pair import WARMLINE, Message, Pair, Reply
from support.processes import free_port
from warmline_common.protocol.tokens import count_common_tokens

# Thinks unless told not to; says its effort before all else, and knows two of them.
TEMPLATE = (
    "{% if effort %}{% if effort not in ('low', 'high') %}{{ raise_exception('effort must be low or high') }}"
    "{% endif %}"
    "{{ '<|im_start|>system\\n' + effort + '<|im_end|>\\n' }}{% endif %}"
    + tiny_models.TEMPLATE.replace(
        "THINK_TAIL' }}", "' }}{{ '<think></think>' if enable_thinking is false else '<think>' }}"
    )
)
CODE = "from mlx_lm.models.llama import Model, ModelArgs\n"
LONG = "Tell me all about it, and leave nothing out. " * 12
MAX_TOKENS = 7
KEEPALIVE_S = 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama under another model type, with code of its own."""
    folder = tiny_models.build("llama", tmp_path_factory.mktemp("options") / "model")
    (folder / "own_llama.py").write_text(CODE)
    for name, changes in {
        "config.json": {"model_type": "own_llama", "model_file": "own_llama.py"},
        "tokenizer_config.json": {"chat_template": TEMPLATE},
    }.items():
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    flags = {
        "--chat-template-args": '{"enable_thinking": false, "effort": null}',
        "--prefill-step-size": "auto",
        "--max-tokens": str(MAX_TOKENS),
        "--temp": "0.9",
        "--top-p": "0.95",
        "--gpu-keepalive": str(KEEPALIVE_S),
    }
    home = tmp_path_factory.mktemp("options") / "home"
    with Pair(home, model, "--trust-remote-code", *itertools.chain(*flags.items())) as pair:
        yield pair


def test_model_code_runs_only_with_trust_remote_code(model: Path, pair: Pair, tmp_path: Path) -> None:
    assert pair.chat([{"role": "user", "content": "hello"}]).text
    command = [WARMLINE, "backend", "--home", str(tmp_path), "--model", str(model), "--backend-port", str(free_port())]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "own_llama.py" in refused.stderr and "pass --trust-remote-code if you trust it" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_settings_are_request_defaults(pair: Pair) -> None:
    def ask(**options: Any) -> Reply:
        return pair.chat([{"role": "user", "content": "Count."}], ignore_eos=True, seed=11, **options)

    plain = ask()
    assert plain.json["choices"][0]["finish_reason"] == "length"
    assert plain.json["usage"]["completion_tokens"] == MAX_TOKENS
    assert ask(max_tokens=3).json["usage"]["completion_tokens"] == 3
    assert ask(temperature=0.9, top_p=0.95).text == plain.text
    assert ask(temperature=0).text != plain.text


def test_prefill_step_is_measured_and_remembered(pair: Pair) -> None:
    remembered = json.loads((pair.home.models / "prefill_steps.json").read_text())
    assert list(remembered.values()) == [pair.status().prefill_step_size]
    assert pair.status().prefill_step_size >= 256


def test_keepalive_counts_tokens(pair: Pair) -> None:
    before = pair.status().keepalive_steps
    pair.chat([{"role": "user", "content": "hello"}])
    while pair.status().keepalive_steps < before + 2:
        pass
    assert pair.chat([{"role": "user", "content": "hello again"}]).text


def render_text(pair: Pair, messages: list[Message], **kwargs: Any) -> bytes:
    return pair.render_prompt(messages, chat_template_kwargs=kwargs).tokens


def test_changed_template_arguments_reuse_common_prefix(pair: Pair) -> None:
    """Exactly the common prefix is reused after a change, and the answer equals a cold one."""
    messages: list[Message] = [{"role": "user", "content": LONG}]
    off, on, low = {}, {"enable_thinking": True}, {"enable_thinking": True, "effort": "low"}
    prompts = [render_text(pair, messages, **kwargs) for kwargs in (off, on, low)]
    assert len(set(prompts)) == 3
    assert render_text(pair, messages, enable_thinking=False) == prompts[0]
    cached = []
    for kwargs in (off, on, off, low, on):
        held = [resident.ids or b"" for resident in pair.residents()]
        prompt = render_text(pair, messages, **kwargs)
        options = {"temperature": 0, "max_tokens": 8, "chat_template_kwargs": kwargs, **WITH_LOGPROBS}
        reply = pair.chat(messages, **options)
        pair.settle()
        cached.append(reply.cached)
        assert reply.cached == max((count_common_tokens(prompt, ids) for ids in held), default=0), (kwargs, cached)
        assert explain_difference(pair.ask_backend(messages, **options), reply) == ""
        messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": f"{len(cached)}? {LONG}"},
        ]
    assert cached[2] > cached[1] > len(LONG) > cached[3], "what is said before all else leaves nothing to reuse"


def test_template_error_returns_400_for_its_request(pair: Pair) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "chat_template_kwargs": {"effort": "mid"}}
    refused = pair.post("/v1/chat/completions", body)
    assert refused.status == 400 and "effort must be low or high" in refused.json["error"]["message"]
    assert pair.chat(body["messages"], chat_template_kwargs={"effort": "low"}).text  # type: ignore[arg-type]
