"""Stuck clients hold no place and no engine, and delay nobody else."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.clients import make_request_head
from support.pair.pair import FolderOf, Message, Pair
from support.pair.waiting import wait_until

STUCK = 8
# Much to send for each token: the answer fills all buffers between the engine and a client that reads nothing.
FLAGS = ("--running-count-max", str(STUCK), "--receive-timeout-s", "600")
LONG = {"max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}


@contextmanager
def connect_and_send(pair: Pair, data: bytes) -> Iterator[socket.socket]:
    """A client that has sent this, and does nothing more."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", pair.port))
        client.sendall(data)
        yield client


def make_request(number: int) -> tuple[bytes, bytes]:
    """(head, body)"""
    body = json.dumps({"messages": [{"role": "user", "content": f"Client {number}."}], **LONG}).encode()
    return make_request_head("/v1/chat/completions", body, {}), body


def test_eight_stuck_clients_do_not_slow_a_ninth(tiny_folder: FolderOf, tmp_path: Path) -> None:
    """Eight that read nothing hold all places until the engine is done with them, and none after that; eight that
    stop in the midst of their bodies hold none at all.
    """
    with Pair(tmp_path / "home", tiny_folder("llama"), *FLAGS) as pair, ExitStack() as stuck:
        for number in range(STUCK):
            stuck.enter_context(connect_and_send(pair, b"".join(make_request(number))))
        wait_until(lambda: pair.proxy_status()["lives"] == STUCK, "they all come in")
        for number in range(STUCK):
            top, body = make_request(number)
            stuck.enter_context(connect_and_send(pair, top + body[:-5]))
        wait_until(lambda: pair.proxy_status()["lives"] == 2 * STUCK, "and those that send slowly")
        wait_until(lambda: pair.proxy_status()["running"] == 0, "the engine is done with those that read nothing")
        messages: list[Message] = [{"role": "user", "content": "And I am the ninth."}]
        reply = pair.chat(messages, max_tokens=8, **WITH_LOGPROBS)
        assert pair.proxy_status()["lives"] >= 2 * STUCK, "all of them are still there"
        assert explain_difference(pair.ask_backend(messages, max_tokens=8, **WITH_LOGPROBS), reply) == ""
