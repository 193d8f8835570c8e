"""Clients that alternate between models with room for one: all are served, and each load counts for a while.

A small case with real processes: tests/proxy/models/test_swaps.py simulates many clients and long times.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import pairwise

import pytest

from support.pair.models_pair import ModelsPair, PairModel
from support.pair.pair import FolderOf, Message

STAY_S = 1.0
TURNS = 2  # of each client that alternates
MEMORY_GB = 0.04  # for one of the models
ANSWER = {"max_tokens": 4, "ignore_eos": True}
LOADED = re.compile(r"^(\S+ \S+) INFO .*: model \S+ is loaded$")


@pytest.fixture(scope="module")
def pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsPair]:
    models = [PairModel("a", tiny_folder("llama")), PairModel("b", tiny_folder("gemma3"))]
    flags = ("--prefill-step-size", "256")
    with ModelsPair(tmp_path_factory.mktemp("pair"), models, *flags, memory_gb=MEMORY_GB, stay_s=STAY_S) as pair:
        pair.check_room(1)
        yield pair


def ask_turns(pair: ModelsPair, model: str) -> int:
    """Number of answered turns of one conversation; `chat` fails where one isn't."""
    messages: list[Message] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"question {turn} for {model}"})
        reply = pair.chat(messages, model=model, **ANSWER)
        messages.append({"role": "assistant", "content": reply.text})
        assert reply.json["model"] == model
    return TURNS


def test_clients_that_alternate_are_served_one_load_a_stay(pair: ModelsPair) -> None:
    """The load of the start is for no request, and so for no time."""
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda model: ask_turns(pair, model), ["a", "b"])) == [TURNS, TURNS]
    ask_turns(pair, "a")
    ask_turns(pair, "b")
    starts = pair.count_starts()
    pair.stop()
    times = list_load_times(pair.read_output())[1:]
    assert len(times) == starts - 1 >= 3, "b's, a's and b's again, or more"
    stay = timedelta(seconds=STAY_S, milliseconds=-1)  # the log's milliseconds are cut off
    assert all(after - before >= stay for before, after in pairwise(times))


def list_load_times(lines: list[str]) -> list[datetime]:
    matches = (LOADED.search(line) for line in lines)
    return [datetime.strptime(match.group(1), "%Y-%m-%d %H:%M:%S,%f") for match in matches if match]
