"""Homes written by the previous version: opened, verified and restored from by this one."""

import json
import tarfile
from pathlib import Path

import pytest

from support.pair.answers import TOLERANCE, WITH_LOGPROBS, list_logprobs
from support.pair.pair import Pair

HOMES = Path(__file__).parents[2] / "fixtures" / "old_home"


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_home_of_previous_version_verifies_and_restores(family: str, tmp_path: Path) -> None:
    with tarfile.open(HOMES / f"{family}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="tar")
    expected = json.loads((tmp_path / "expected.json").read_text())
    pair = Pair(tmp_path / "home", tmp_path / "model")
    pair.cachectl("verify")
    with pair:
        reply = pair.chat(expected["messages"], max_tokens=len(expected["logprobs"]), **WITH_LOGPROBS)
    assert reply.headers["X-Warmline-Cache"] == expected["cache"]
    assert reply.text == expected["content"]
    logprobs = [token["logprob"] for token in list_logprobs(reply.json["choices"][0])]
    assert logprobs == pytest.approx(expected["logprobs"], abs=TOLERANCE)
