"""Clients with two models, set up as docs/clients.md says: each request lands on its own model, later ones warm.

The models are two trained ones with fingerprints of their own, so that neither can start from the other's KV.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.agent_model.agent_folder import build
from support.docs.clients_page import list_files, read_section
from support.pair.models_pair import ModelsPair, PairModel
from support.pair.pair import Pair
from support.pair.recorded import RecordedAnswer, count_reusable, read_client, send_turn
from warmline_common.settings.models import ModelConfig, parse_models

MEMORY_GB = {"both": 1.0, "one": 0.07}  # a model of these needs 0.043
TURNS = 2


def read_models() -> list[ModelConfig]:
    (table,) = re.findall(r"```toml\n(.*?)```", read_section("Two models"), flags=re.DOTALL)
    return parse_models(json.dumps(tomllib.loads(table)["models"]))


def read_last_file(section: str, start: str) -> str:
    """Last file of a section that begins so."""
    return [text for text in list_files(section) if text.startswith(start)][-1]


def read_claude_code_models() -> tuple[str, str]:
    """Names of the large and of the small model in the section's last commands."""
    large, small = re.findall(
        r"ANTHROPIC_MODEL=(\S+) ANTHROPIC_DEFAULT_HAIKU_MODEL=(\S+)", read_section("Claude Code")
    )[-1]
    return large, small


def read_opencode_models() -> tuple[str, str]:
    config = json.loads(read_last_file("OpenCode", "{"))
    (provider,) = config["provider"]
    large, small = (config[key].removeprefix(f"{provider}/") for key in ("model", "small_model"))
    assert set(config["provider"][provider]["models"]) == {large, small}
    return large, small


@pytest.fixture(scope="module")
def folders(agent_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    other = build(tmp_path_factory.mktemp("models") / "other")
    config = json.loads((other / "config.json").read_text())
    config["max_position_embeddings"] -= 64  # changes nothing but the fingerprint
    (other / "config.json").write_text(json.dumps(config))
    return [agent_folder, other]


@pytest.fixture(scope="module")
def pair(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsPair]:
    """Pair with memory for one of the models."""
    with make_pair(folders, tmp_path_factory.mktemp("one"), MEMORY_GB["one"]) as pair:
        yield pair


@pytest.fixture(scope="module")
def roomy_pair(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsPair]:
    """Pair with memory for both models."""
    with make_pair(folders, tmp_path_factory.mktemp("both"), MEMORY_GB["both"]) as pair:
        yield pair


def make_pair(folders: list[Path], home: Path, memory_gb: float) -> ModelsPair:
    models = [
        PairModel(model.name, folder, model.aliases, model.pinned, model.settings)
        for model, folder in zip(read_models(), folders, strict=True)
    ]
    return ModelsPair(home, models, "--prefill-step-size", "512", memory_gb=memory_gb, stay_s=0)


def make_router(litellm: Any, pair: Pair) -> Any:
    """LiteLLM's router with the deployments of docs/clients.md."""
    entries = yaml.safe_load(read_last_file("LiteLLM proxy", "model_list:"))["model_list"]
    for entry in entries:
        entry["litellm_params"]["api_base"] = f"{pair.url}/v1"
    return litellm.Router(model_list=entries, num_retries=0)


def test_litellm_router_alternates_between_models(litellm: Any, roomy_pair: ModelsPair) -> None:
    router = make_router(litellm, roomy_pair)
    names = {"planner": "large", "summarizer": "small"}
    talks: dict[str, list[Any]] = {name: [{"role": "user", "content": f"I am {name}. Say: pong"}] for name in names}
    held = dict.fromkeys(names, 0)
    for turn in range(TURNS):
        for name, messages in talks.items():
            answer = router.completion(model=name, messages=messages)
            roomy_pair.settle()
            text = answer.choices[0].message.content
            assert answer.usage.prompt_tokens_details.cached_tokens >= held[name], f"{name} in turn {turn}"
            held[name] = answer.usage.prompt_tokens - 3  # the template leaves out its reasoning later
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Say: pong"}]
    roomy_pair.check_answered(*[(model, model) for model in names.values()] * TURNS)
    assert roomy_pair.count_starts() == len(names), "there is memory for both"


def test_claude_code_of_two_models(pair: ModelsPair) -> None:
    """Recorded turns under an alias of docs/clients.md; the other model answers after the first one."""
    large, small = read_claude_code_models()
    recorded, answers = read_client("claude-code"), list[RecordedAnswer]()
    model, other = "claude-haiku-5-5", large
    assert model != small
    recorded["body"]["system"][1]["text"] += f" As {model}."
    for turn in recorded["turns"]:
        call_id = next((answer.call_ids[0] for answer in reversed(answers) if answer.call_ids), "")
        answer = send_turn(pair, recorded, turn, call_id, model=model)
        assert (answer.text, answer.calls) == (turn.get("text", ""), [tuple(call) for call in turn.get("calls", [])])
        if answers:
            assert answer.cached_tokens >= count_reusable(answers, turn["goes_on_from"])
        pair.settle()
        if not answers:
            before = pair.count_starts()
            pair.chat([{"role": "user", "content": "Say: pong"}], model=other)
            assert pair.count_starts() == before + 1, "there is memory for one"
            pair.settle()
        answers.append(answer)
    own = ("small", model)
    pair.check_answered(own, (other, other), *[own] * (len(answers) - 1))


def test_opencode_of_two_models(pair: ModelsPair) -> None:
    """The main request and the title's, twice each."""
    large, small = read_opencode_models()
    main, title = read_client("opencode"), read_client("opencode-title")
    first: dict[str, int] = {}
    for _ in range(2):
        for client, model in ((title, small), (main, large)):
            answer = send_turn(pair, client, client["turns"][0], model=model)
            assert (answer.text, answer.calls) == (
                client["turns"][0].get("text", ""),
                [tuple(call) for call in client["turns"][0].get("calls", [])],
            )
            assert answer.cached_tokens >= first.get(model, 0)
            first[model] = answer.prompt_tokens - 1
            pair.settle()
    pair.check_answered(*[("small", small), ("large", large)] * 2)
