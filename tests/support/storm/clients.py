"""Clients of a storm: regular, impatient and hostile ones.  Each method of `StormClient` is one encounter."""

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.pair.clients import ClientRequest, make_request_head
from support.pair.pair import Pair, send_request
from support.storm.log import StormLog
from support.storm.prompts import StormPrompt, StormPrompts

# Without a byte; a request that waits longer hangs.  A response that is not streamed has no byte before its end, and
# waits for its turn, for restarts and for prefills that begin again.
SILENCE_MAX_S = 60.0
WAIT_MAX_S = 240.0
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


class StormClient:
    """Clients of one thread, one after the other."""

    def __init__(self, pair: Pair, prompts: StormPrompts, log: StormLog, rng: random.Random) -> None:
        self.pair, self.prompts, self.log, self.rng = pair, prompts, log, rng

    # ---- regular clients

    def ask_any(self) -> None:
        self._ask_to_end(self.prompts.choose(self.rng))

    def ask_long(self) -> None:
        self._ask_to_end(self.rng.choice(self.prompts.long))

    def continue_conversation(self) -> None:
        session = f"talk-{self.rng.random()}"
        for turn in self.rng.choice(self.prompts.conversations):
            if not self._ask_to_end(turn, session=session):
                return

    def read_slowly(self) -> None:
        self._ask_to_end(self.rng.choice(self.prompts.talkative), stream=True, read_pause_s=0.05)

    def send_slowly(self) -> None:
        prompt = self.prompts.choose(self.rng)
        with self._send_request(prompt, stream=self.rng.random() < 0.5, send_pause_s=0.01) as request:
            self._wait_for_end(request, prompt)

    # ---- impatient clients

    def disconnect_early(self) -> None:
        prompt = self.prompts.choose(self.rng)
        with self._send_request(prompt, stream=self.rng.random() < 0.5) as request:
            if not self._ends_within(request, self.rng.uniform(0, LEAVE_AFTER_MAX_S)):
                request.disconnect(self.rng.choice(["fin", "rst"]))
                self.log.count("left")
                return
            self._wait_for_end(request, prompt)

    def retry_after_timeout(self) -> None:
        """Retry after a time limit, as SDKs do, sometimes without closing the first connection."""
        prompt, session = self.prompts.choose(self.rng), f"retry-{self.rng.random()}"
        limit_s = self.rng.uniform(CLIENT_TIMEOUT_MAX_S / 4, CLIENT_TIMEOUT_MAX_S)
        with contextlib.ExitStack() as stack:
            for attempt in range(TRIES_MAX):
                more = {"headers": {RETRY_COUNT: str(attempt)}, SESSION: session}
                request = stack.enter_context(self._send_request(prompt, stream=self.rng.random() < 0.5, **more))
                if attempt == TRIES_MAX - 1 or self._ends_within(request, limit_s):
                    self._wait_for_end(request, prompt)
                    return
                self.log.count("left")
                if self.rng.random() < 0.8:
                    request.disconnect(self.rng.choice(["fin", "rst"]))

    def delete_request(self) -> None:
        prompt, name = self.prompts.choose(self.rng), f"storm-{self.rng.getrandbits(64):x}"
        with self._send_request(prompt, stream=self.rng.random() < 0.5, headers={NAME: name}) as request:
            if self._ends_within(request, self.rng.uniform(0, LEAVE_AFTER_MAX_S)):
                self._wait_for_end(request, prompt)
                return
            with contextlib.suppress(OSError):
                reply = send_request(f"{self.pair.url}/v1/requests/{name}", None, {}, "DELETE")
                self.log.count(f"DELETE {reply.status}")
            self._wait_for_end(request, prompt)

    # ---- hostile clients

    def stop_reading(self) -> None:
        """Ask, and never read."""
        prompt = self.rng.choice(self.prompts.talkative)
        with self._connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
            body = json.dumps({"messages": prompt.messages, "stream": True, **prompt.options}).encode()
            connection.sendall(make_request_head("/v1/chat/completions", body, {}) + body)
            self._keep_open()

    def send_half_request(self) -> None:
        body = b'{"messages": [{"role": "user", "content": "'
        whole = make_request_head("/v1/chat/completions", body * 2, {}) + body
        with self._connect() as connection:
            connection.sendall(whole[: self.rng.randrange(len(whole))])
            self._keep_open()

    def stay_idle(self) -> None:
        with self._connect():
            self._keep_open()

    def send_garbage(self) -> None:
        with self._connect() as connection:
            connection.sendall(self.rng.randbytes(self.rng.randrange(1, 5000)))
            self._read_to_end(connection)

    def send_huge_head(self) -> None:
        with self._connect() as connection:
            connection.sendall(make_request_head("/v1/chat/completions", b"", {"X-Much": "y" * 200_000}))
            self._read_to_end(connection)

    def send_huge_body(self) -> None:
        with self._connect() as connection:
            connection.sendall(make_request_head("/v1/chat/completions", b"", {"Content-Length": str(1 << 40)}))
            connection.sendall(b"[" * 300_000)
            self._keep_open()

    def reconnect_repeatedly(self) -> None:
        for _ in range(LOOPS):
            with self._connect():
                pass

    # ---- helpers

    def _ask_to_end(self, prompt: StormPrompt, *, session: str = "", **options: object) -> bool:
        more = {SESSION: session} if session else {}
        with self._send_request(prompt, **{"stream": self.rng.random() < 0.5, **options, **more}) as request:
            return self._wait_for_end(request, prompt)

    @contextmanager
    def _send_request(self, prompt: StormPrompt, **options: object) -> Iterator[ClientRequest]:
        """Send a request that the log watches until its end."""
        request = ClientRequest(self.pair, prompt.messages, **{**prompt.options, **options})
        self.log.watch(request)
        try:
            yield request
        finally:
            request.disconnect()
            self.log.unwatch(request)

    def _wait_for_end(self, request: ClientRequest, prompt: StormPrompt) -> bool:
        """Wait for the end, or until the request hangs; whether it was answered."""
        wait_for_end(request)
        return self.log.record_end(request, prompt)

    def _ends_within(self, request: ClientRequest, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while not request.is_ended and time.monotonic() < limit:
            time.sleep(POLL_S)
        return request.is_ended

    @contextmanager
    def _connect(self) -> Iterator[socket.socket]:
        """Open a connection that the other side may close at any moment."""
        connection = socket.create_connection(("127.0.0.1", self.pair.port), RAW_TIMEOUT_S)
        with connection, contextlib.suppress(OSError):
            yield connection

    def _keep_open(self) -> None:
        self.log.released.wait(self.rng.uniform(0, HOLD_MAX_S))

    def _read_to_end(self, connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):
            pass


def wait_for_end(request: ClientRequest) -> None:
    """Wait for the end of a request, or until it hangs."""
    request.wait_while_bytes_come(SILENCE_MAX_S if request.wants_stream else WAIT_MAX_S)


# Encounters of each thread, which chooses one of them every time.
CLIENT_THREADS: list[list[Callable[[StormClient], None]]] = [
    [StormClient.ask_any],
    [StormClient.ask_any, StormClient.continue_conversation],
    [StormClient.continue_conversation],
    [StormClient.ask_long],
    [StormClient.ask_long, StormClient.disconnect_early],
    [StormClient.disconnect_early],
    [StormClient.disconnect_early, StormClient.delete_request],
    [StormClient.retry_after_timeout],
    [StormClient.retry_after_timeout, StormClient.send_slowly],
    [StormClient.read_slowly, StormClient.send_slowly],
    [StormClient.stop_reading, StormClient.send_half_request, StormClient.stay_idle],
    [StormClient.send_half_request, StormClient.stay_idle, StormClient.stop_reading],
    [
        StormClient.send_garbage,
        StormClient.send_huge_head,
        StormClient.send_huge_body,
        StormClient.reconnect_repeatedly,
    ],
]
