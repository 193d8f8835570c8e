"""Load of many clients that keep their connections."""

import json
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection

from common.servers import REQUEST_TIMEOUT_S, BenchServer, get_status

SETTLE_INTERVAL_S = 0.25  # between looks, which cost the proxy time too


class KeptConnection:
    """One client's connection, kept open between its requests, as agents do."""

    def __init__(self, server: BenchServer) -> None:
        self._server = server
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_TIMEOUT_S)

    def ask(self, text: str, answer_tokens: int, *, stream: bool = False) -> None:
        """Send one user message, greedy, and read the whole answer."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": answer_tokens,
            "temperature": 0,
            "stream": stream,
        }
        headers = {"Content-Type": "application/json", **self._server.headers}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = self._connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise SystemExit(f"{self._server.name} answered {response.status}: {data[:500].decode(errors='replace')}")

    def close(self) -> None:
        self._connection.close()


def run_clients(server: BenchServer, clients: int, work: Callable[[KeptConnection, int], None]) -> None:
    """Run `work(connection, number of the client)` for all clients at once; returns when all have ended."""

    def run(number: int) -> None:
        connection = KeptConnection(server)
        try:
            work(connection, number)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_until_saved(pair: BenchServer) -> None:
    """Return when nothing of earlier requests is left to do; few looks, unlike `BenchServer.wait_until_saved`."""
    while True:
        status, body = get_status(pair.port, "/metrics")
        if status == 200 and b"\nwarmline_requests_settling 0.0" in body:
            return
        time.sleep(SETTLE_INTERVAL_S)


def repeat_prompts(pair: BenchServer, clients: int, count_each: int, answer_tokens: int) -> None:
    """Each client repeats a small prompt of its own, streamed and not in turn: all but its last token is reused."""

    def repeat(connection: KeptConnection, number: int) -> None:
        for each in range(count_each):
            connection.ask(f"client {number} asks the same again", answer_tokens, stream=bool(each % 2))

    run_clients(pair, clients, repeat)
