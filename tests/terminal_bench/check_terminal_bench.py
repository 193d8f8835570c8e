"""Terminal-Bench's agent on a real pair: `make terminal-bench`, with a Python of its own.

Its name keeps it out of `make test`, where that Python may not be.
"""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent_model.agent_folder import build
from support.launch.launched_client import LaunchedClient
from support.pair.pair import Pair
from support.pair.waiting import wait_until

PYTHON = os.environ["WARMLINE_TERMINAL_BENCH_PYTHON"]
HARNESS = Path(__file__).parents[1] / "support" / "terminal_bench" / "bin"
KEY = "of-the-client"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home, model = tmp_path_factory.mktemp("home"), build(tmp_path_factory.mktemp("models") / "agent")
    with Pair(home, model, environment={**os.environ, "WARMLINE_CLIENT_KEY": KEY}) as pair:
        yield pair


@pytest.fixture(scope="module")
def agent_report(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Report of the agent about all that it did.  The pair was killed while its first command ran."""
    folder, variables = tmp_path_factory.mktemp("work"), {"WARMLINE_TERMINAL_BENCH_PYTHON": PYTHON}
    client = LaunchedClient("terminal-bench", pair, folder, str(HARNESS), "--key", KEY, **variables)
    client.wait_for_tool()
    wait_until(lambda: bool(pair.requests()), "the first turn is not recorded")
    pair.settle()
    pair.kill()
    pair.start()
    client.end_tool()
    output = client.wait()
    assert client.process.returncode == 0, output
    pair.settle()
    return json.loads(output.splitlines()[-1])


def list_requests(pair: Pair, model: str) -> list[Any]:
    """List the records of the requests for this model, oldest first."""
    return [record for record in reversed(pair.requests()) if record["client_model"] == model]


def assert_turns_continue(turns: list[Any]) -> None:
    """Check that each turn reuses the last prompt; the client drops reasoning, so answers are other texts."""
    for before, after in itertools.pairwise(turns):
        assert after["cached_tokens"] >= before["prompt_tokens"], (before, after)


def test_the_agent_does_its_task(pair: Pair, agent_report: Any) -> None:
    assert agent_report["task"]["failure"] == "none"
    assert agent_report["task"]["text"] == "Hello, world!\n"
    episodes = [f"Episode {turn}: {count} commands" for turn, count in enumerate([1, 1, 0, 0])]
    assert agent_report["task"]["commands"] == episodes
    turns = list_requests(pair, "agent")
    assert len(turns) == 4 and {turn["outcome"] for turn in turns} == {"ok"}
    assert_turns_continue(turns)


def test_a_chat_is_answered_right_and_warm(pair: Pair, agent_report: Any) -> None:
    assert agent_report["chat"] == ["Paris.", "Tokyo."]
    turns = list_requests(pair, "chat")
    assert len(turns) == 2
    assert_turns_continue(turns)


def test_an_answer_has_the_form_that_was_asked_for(agent_report: Any) -> None:
    assert agent_report["structured"] == {"city": "Rome", "country": "Italy"}


def test_a_prompt_that_is_too_long_is_known_for_that_at_once(pair: Pair, agent_report: Any) -> None:
    assert agent_report["too-long"] == {"raised": "ContextLengthExceededError", "tries": 1}
    assert len(list_requests(pair, "too-long")) <= 1  # never sent again


def test_an_answer_that_is_cut_says_so(pair: Pair, agent_report: Any) -> None:
    assert agent_report["cut"] == {"raised": "OutputLengthExceededError", "tries": 1}
    assert len(list_requests(pair, "cut")) == 1


def test_a_wrong_key_is_not_tried_again(pair: Pair, agent_report: Any) -> None:
    assert agent_report["wrong-key"] == {"raised": "AuthenticationError", "tries": 1}
    assert list_requests(pair, "wrong-key") == []
