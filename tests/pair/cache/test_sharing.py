"""Sharing: common prefixes are stored once, and a stored row takes only its own bytes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pair.pair import FolderOf, Message, Pair
from warmline_common.protocol.messages import KvLayout
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_common.storage.segment_file import read_header, verify_file

SYSTEM: Message = {"role": "system", "content": "You answer shortly. " * 70}
TOKENS = 10
ROW_FACTOR_MAX, FILE_BYTES_MAX = 1.03, 4096  # what a file may weigh over its rows


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def pair(
    request: pytest.FixtureRequest, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("sharing"), tiny_folder(request.param)) as pair:
        yield pair


def make_user_message(text: str) -> list[Message]:
    return [SYSTEM, {"role": "user", "content": text}]


def send_turn(pair: Pair, messages: list[Message]) -> bytes:
    """Run a turn until its save; the packed tokens that have KV."""
    reply = pair.chat(messages, max_tokens=TOKENS)
    pair.settle()
    answer: Message = {"role": "assistant", "content": reply.text}
    # All tokens generated have KV, the last one too: the engine computes one step ahead.
    return pair.render_prompt([*messages, answer]).tokens[: (reply.prompt_tokens + TOKENS) * TOKEN_BYTES]


def list_stored(pair: Pair) -> dict[str, Any]:
    view = pair.cachectl("stats")["stored"]
    assert isinstance(view, dict)
    return view


def list_files(pair: Pair) -> list[Path]:
    return sorted(pair.home.segments.rglob("*.safetensors"))


def test_shared_prefix_is_stored_once(pair: Pair) -> None:
    first = send_turn(pair, make_user_message("Tell me about the sea, please."))
    assert list_stored(pair)["tokens"] == len(first) // TOKEN_BYTES
    second = send_turn(pair, make_user_message("What do you know of mountains?"))
    shared = count_common_tokens(first, second)
    assert shared > len(SYSTEM["content"])
    assert list_stored(pair)["tokens"] == (len(first) + len(second)) // TOKEN_BYTES - shared
    assert len(pair.cachectl("inspect")["sessions"]) == 2
    check_files(pair)


def test_diverging_conversation_stores_only_its_tail(pair: Pair) -> None:
    opening = make_user_message("Count the ships.")
    answer: Message = {"role": "assistant", "content": pair.chat(opening, max_tokens=TOKENS).text}
    trunk = send_turn(pair, [*opening, answer, {"role": "user", "content": "And the red ones among them?"}])
    before = list_stored(pair)["tokens"]
    branch = send_turn(pair, [*opening, answer, {"role": "user", "content": "And the red boats, or blue?"}])
    own = len(branch) // TOKEN_BYTES - count_common_tokens(trunk, branch)
    assert list_stored(pair)["tokens"] == before + own
    assert own < 60
    check_files(pair)


def test_repeated_conversation_stores_nothing(pair: Pair) -> None:
    send_turn(pair, make_user_message("Say it again."))
    before, paths = list_stored(pair), list_files(pair)
    send_turn(pair, make_user_message("Say it again."))
    after = list_stored(pair)
    assert list_files(pair) == paths
    assert {name: after[name] for name in after if name not in ("bytes_index", "bytes_used")} == {
        name: before[name] for name in before if name not in ("bytes_index", "bytes_used")
    }


def check_files(pair: Pair) -> None:
    """Check each file's size against its rows or state, and their sum against cachectl's."""
    layout, view = pair.status().layout, list_stored(pair)
    assert layout is not None
    paths = list_files(pair)
    for path in paths:
        verify_file(path)
        check_size(path, layout)
    assert sum(path.stat().st_size for path in paths) == view["bytes_segments"] + view["bytes_checkpoints"]
    assert len(paths) == view["segments"] + view["checkpoints"]
    assert bool(view["checkpoints"]) == layout.has_states
    assert pair.cachectl("verify", "--deep")["findings"] == []


def check_size(path: Path, layout: KvLayout) -> None:
    header = read_header(path)
    rows = header.meta.end - header.meta.start
    size = layout.state_bytes if header.meta.kind == "checkpoint" else rows * layout.row_bytes
    assert path.stat().st_size <= ROW_FACTOR_MAX * size + FILE_BYTES_MAX
    held = {name: place for name, place in header.tensors.items() if name not in ("tokens", "checksums")}
    assert sum(place.bytes_count for place in held.values()) == size
    if header.meta.kind == "segment":
        assert {place.shape[2] for place in held.values()} == {rows}, "no row more"
        assert all(math.prod(place.shape) for place in held.values())
