"""The clients of a storm: good ones, impatient ones, and the network's worst.  Each function is one encounter."""

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

PATIENCE_S = 60.0  # without a byte; whoever waits longer hangs
LEAVE_AFTER_MAX_S = 3.0
CLIENT_TIMEOUT_MAX_S = 4.0
TRIES_MAX = 4
HOLD_MAX_S = 8.0
RAW_TIMEOUT_S = 5.0
LOOPS = 40
SMALL_BUFFER_BYTES = 2048
GLANCE_S = 0.01
RETRY_COUNT = "X-Stainless-Retry-Count"
SESSION = "session_id"
NAME = "X-Warmline-Request"


class Client:
    """One thread's clients, one after the other."""

    def __init__(self, pair: Pair, questions: Questions, log: Log, dice: random.Random) -> None:
        self.pair, self.questions, self.log, self.dice = pair, questions, log, dice

    # ---- good ones

    def plain(self) -> None:
        self._whole(self.questions.any_of(self.dice))

    def long(self) -> None:
        self._whole(self.dice.choice(self.questions.long))

    def converse(self) -> None:
        session = f"talk-{self.dice.random()}"
        for turn in self.dice.choice(self.questions.conversations):
            if not self._whole(turn, session=session):
                return

    def slow_reader(self) -> None:
        self._whole(self.dice.choice(self.questions.talkative), stream=True, read_pause_s=0.05)

    def slow_sender(self) -> None:
        question = self.questions.any_of(self.dice)
        with self._asking(question, stream=self.dice.random() < 0.5, send_pause_s=0.01) as asked:
            self._wait(asked, question)

    # ---- impatient ones

    def leaver(self) -> None:
        question = self.questions.any_of(self.dice)
        with self._asking(question, stream=self.dice.random() < 0.5) as asked:
            if not self._over_within(asked, self.dice.uniform(0, LEAVE_AFTER_MAX_S)):
                asked.leave(self.dice.choice(["fin", "rst"]))
                self.log.count("left")
                return
            self._wait(asked, question)

    def retrier(self) -> None:
        """Gives up after its own time limit and asks the same again, as SDKs do; now and then on a dead connection."""
        question, session = self.questions.any_of(self.dice), f"retry-{self.dice.random()}"
        limit_s = self.dice.uniform(CLIENT_TIMEOUT_MAX_S / 4, CLIENT_TIMEOUT_MAX_S)
        with contextlib.ExitStack() as stack:
            for attempt in range(TRIES_MAX):
                more = {"headers": {RETRY_COUNT: str(attempt)}, SESSION: session}
                asked = stack.enter_context(self._asking(question, stream=self.dice.random() < 0.5, **more))
                if attempt == TRIES_MAX - 1 or self._over_within(asked, limit_s):
                    self._wait(asked, question)
                    return
                self.log.count("left")
                if self.dice.random() < 0.8:
                    asked.leave(self.dice.choice(["fin", "rst"]))

    def deleter(self) -> None:
        question, name = self.questions.any_of(self.dice), f"storm-{self.dice.getrandbits(64):x}"
        with self._asking(question, stream=self.dice.random() < 0.5, headers={NAME: name}) as asked:
            if self._over_within(asked, self.dice.uniform(0, LEAVE_AFTER_MAX_S)):
                self._wait(asked, question)
                return
            with contextlib.suppress(OSError):
                reply = ask(f"{self.pair.url}/v1/requests/{name}", None, {}, "DELETE")
                self.log.count(f"DELETE {reply.status}")
            self._wait(asked, question)

    # ---- the worst

    def stuck(self) -> None:
        """Asks, and never reads."""
        question = self.dice.choice(self.questions.talkative)
        with self._raw() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
            body = json.dumps({"messages": question.messages, "stream": True, **question.options}).encode()
            connection.sendall(head("/v1/chat/completions", body, {}) + body)
            self._hold()

    def half_open(self) -> None:
        body = b'{"messages": [{"role": "user", "content": "'
        whole = head("/v1/chat/completions", body * 2, {}) + body
        with self._raw() as connection:
            connection.sendall(whole[: self.dice.randrange(len(whole))])
            self._hold()

    def idle(self) -> None:
        with self._raw():
            self._hold()

    def garbage(self) -> None:
        with self._raw() as connection:
            connection.sendall(self.dice.randbytes(self.dice.randrange(1, 5000)))
            self._read_out(connection)

    def huge_head(self) -> None:
        with self._raw() as connection:
            connection.sendall(head("/v1/chat/completions", b"", {"X-Much": "y" * 200_000}))
            self._read_out(connection)

    def huge_body(self) -> None:
        with self._raw() as connection:
            connection.sendall(head("/v1/chat/completions", b"", {"Content-Length": str(1 << 40)}))
            connection.sendall(b"[" * 300_000)
            self._hold()

    def loop(self) -> None:
        for _ in range(LOOPS):
            with self._raw():
                pass

    # ---- how

    def _whole(self, question: Question, *, session: str = "", **options: object) -> bool:
        more = {SESSION: session} if session else {}
        with self._asking(question, **{"stream": self.dice.random() < 0.5, **options, **more}) as asked:
            return self._wait(asked, question)

    @contextmanager
    def _asking(self, question: Question, **options: object) -> Iterator[Asked]:
        """A request that the log hears of, whatever becomes of it."""
        asked = Asked(self.pair, question.messages, **{**question.options, **options})
        self.log.watch(asked)
        try:
            yield asked
        finally:
            asked.leave()
            self.log.forget(asked)

    def _wait(self, asked: Asked, question: Question) -> bool:
        """Until its end, or until it hangs.  Whether it was answered."""
        while not asked.over and time.monotonic() - asked.moved < PATIENCE_S:
            time.sleep(GLANCE_S)
        return self.log.ended(asked, question)

    def _over_within(self, asked: Asked, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while not asked.over and time.monotonic() < limit:
            time.sleep(GLANCE_S)
        return asked.over

    @contextmanager
    def _raw(self) -> Iterator[socket.socket]:
        """A connection for what no client library would do; the other side may end it at any moment."""
        connection = socket.create_connection(("127.0.0.1", self.pair.port), RAW_TIMEOUT_S)
        with connection, contextlib.suppress(OSError):
            yield connection

    def _hold(self) -> None:
        self.log.released.wait(self.dice.uniform(0, HOLD_MAX_S))

    def _read_out(self, connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):
            pass


# How many threads do what, each choosing anew every time.
CROWD: list[list[Callable[[Client], None]]] = [
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
