"""Clients of a storm: regular, impatient and hostile ones.  Each method of `Client` is one encounter."""

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.pair.clients import Asked, head
from support.pair.pair import Pair, ask
from support.storm.log import Log
from support.storm.prompts import Question, Questions

SILENCE_MAX_S = 60.0  # without a byte; a request that waits longer hangs
LEAVE_AFTER_MAX_S = 3.0
CLIENT_TIMEOUT_MAX_S = 4.0
TRIES_MAX = 4
HOLD_MAX_S = 8.0
RAW_TIMEOUT_S = 5.0
LOOPS = 40
SMALL_BUFFER_BYTES = 2048
POLL_S = 0.01
RETRY_COUNT = "X-Stainless-Retry-Count"
SESSION = "session_id"
NAME = "X-Warmline-Request"


class Client:
    """Clients of one thread, one after the other."""

    def __init__(self, pair: Pair, questions: Questions, log: Log, rng: random.Random) -> None:
        self.pair, self.questions, self.log, self.rng = pair, questions, log, rng

    # ---- regular clients

    def plain(self) -> None:
        self._ask_to_end(self.questions.choose(self.rng))

    def long(self) -> None:
        self._ask_to_end(self.rng.choice(self.questions.long))

    def converse(self) -> None:
        session = f"talk-{self.rng.random()}"
        for turn in self.rng.choice(self.questions.conversations):
            if not self._ask_to_end(turn, session=session):
                return

    def slow_reader(self) -> None:
        self._ask_to_end(self.rng.choice(self.questions.talkative), stream=True, read_pause_s=0.05)

    def slow_sender(self) -> None:
        question = self.questions.choose(self.rng)
        with self._ask(question, stream=self.rng.random() < 0.5, send_pause_s=0.01) as asked:
            self._wait(asked, question)

    # ---- impatient clients

    def leaver(self) -> None:
        question = self.questions.choose(self.rng)
        with self._ask(question, stream=self.rng.random() < 0.5) as asked:
            if not self._ends_within(asked, self.rng.uniform(0, LEAVE_AFTER_MAX_S)):
                asked.leave(self.rng.choice(["fin", "rst"]))
                self.log.count("left")
                return
            self._wait(asked, question)

    def retrier(self) -> None:
        """Retry after a time limit, as SDKs do, sometimes without closing the first connection."""
        question, session = self.questions.choose(self.rng), f"retry-{self.rng.random()}"
        limit_s = self.rng.uniform(CLIENT_TIMEOUT_MAX_S / 4, CLIENT_TIMEOUT_MAX_S)
        with contextlib.ExitStack() as stack:
            for attempt in range(TRIES_MAX):
                more = {"headers": {RETRY_COUNT: str(attempt)}, SESSION: session}
                asked = stack.enter_context(self._ask(question, stream=self.rng.random() < 0.5, **more))
                if attempt == TRIES_MAX - 1 or self._ends_within(asked, limit_s):
                    self._wait(asked, question)
                    return
                self.log.count("left")
                if self.rng.random() < 0.8:
                    asked.leave(self.rng.choice(["fin", "rst"]))

    def deleter(self) -> None:
        question, name = self.questions.choose(self.rng), f"storm-{self.rng.getrandbits(64):x}"
        with self._ask(question, stream=self.rng.random() < 0.5, headers={NAME: name}) as asked:
            if self._ends_within(asked, self.rng.uniform(0, LEAVE_AFTER_MAX_S)):
                self._wait(asked, question)
                return
            with contextlib.suppress(OSError):
                reply = ask(f"{self.pair.url}/v1/requests/{name}", None, {}, "DELETE")
                self.log.count(f"DELETE {reply.status}")
            self._wait(asked, question)

    # ---- hostile clients

    def stuck(self) -> None:
        """Ask, and never read."""
        question = self.rng.choice(self.questions.talkative)
        with self._raw() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
            body = json.dumps({"messages": question.messages, "stream": True, **question.options}).encode()
            connection.sendall(head("/v1/chat/completions", body, {}) + body)
            self._hold()

    def half_open(self) -> None:
        body = b'{"messages": [{"role": "user", "content": "'
        whole = head("/v1/chat/completions", body * 2, {}) + body
        with self._raw() as connection:
            connection.sendall(whole[: self.rng.randrange(len(whole))])
            self._hold()

    def idle(self) -> None:
        with self._raw():
            self._hold()

    def garbage(self) -> None:
        with self._raw() as connection:
            connection.sendall(self.rng.randbytes(self.rng.randrange(1, 5000)))
            self._read_to_end(connection)

    def huge_head(self) -> None:
        with self._raw() as connection:
            connection.sendall(head("/v1/chat/completions", b"", {"X-Much": "y" * 200_000}))
            self._read_to_end(connection)

    def huge_body(self) -> None:
        with self._raw() as connection:
            connection.sendall(head("/v1/chat/completions", b"", {"Content-Length": str(1 << 40)}))
            connection.sendall(b"[" * 300_000)
            self._hold()

    def loop(self) -> None:
        for _ in range(LOOPS):
            with self._raw():
                pass

    # ---- helpers

    def _ask_to_end(self, question: Question, *, session: str = "", **options: object) -> bool:
        more = {SESSION: session} if session else {}
        with self._ask(question, **{"stream": self.rng.random() < 0.5, **options, **more}) as asked:
            return self._wait(asked, question)

    @contextmanager
    def _ask(self, question: Question, **options: object) -> Iterator[Asked]:
        """Send a request that the log watches until its end."""
        asked = Asked(self.pair, question.messages, **{**question.options, **options})
        self.log.watch(asked)
        try:
            yield asked
        finally:
            asked.leave()
            self.log.forget(asked)

    def _wait(self, asked: Asked, question: Question) -> bool:
        """Wait for the end, or until the request hangs; whether it was answered."""
        while not asked.over and time.monotonic() - asked.moved < SILENCE_MAX_S:
            time.sleep(POLL_S)
        return self.log.ended(asked, question)

    def _ends_within(self, asked: Asked, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while not asked.over and time.monotonic() < limit:
            time.sleep(POLL_S)
        return asked.over

    @contextmanager
    def _raw(self) -> Iterator[socket.socket]:
        """Open a connection that the other side may close at any moment."""
        connection = socket.create_connection(("127.0.0.1", self.pair.port), RAW_TIMEOUT_S)
        with connection, contextlib.suppress(OSError):
            yield connection

    def _hold(self) -> None:
        self.log.released.wait(self.rng.uniform(0, HOLD_MAX_S))

    def _read_to_end(self, connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):
            pass


# Encounters of each thread, which chooses one of them every time.
CLIENT_THREADS: list[list[Callable[[Client], None]]] = [
    [Client.plain],
    [Client.plain, Client.converse],
    [Client.converse],
    [Client.long],
    [Client.long, Client.leaver],
    [Client.leaver],
    [Client.leaver, Client.deleter],
    [Client.retrier],
    [Client.retrier, Client.slow_sender],
    [Client.slow_reader, Client.slow_sender],
    [Client.stuck, Client.half_open, Client.idle],
    [Client.half_open, Client.idle, Client.stuck],
    [Client.garbage, Client.huge_head, Client.huge_body, Client.loop],
]
