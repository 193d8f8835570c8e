"""Child process for the supervisor's tests: prints its events, answers GET /ready, ends on SIGTERM.

Usage: stand_in_process.py NAME PORT [stubborn|misconfigured]
"""

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import FrameType

from warmline_common.process.parent_watch import watch_parent


class ReadyHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def print_line(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one write a line: several processes share this pipe


def main(name: str, port: int, manner: str) -> None:
    if manner == "misconfigured":
        print_line(f"{name}: no such model")
        sys.exit(2)

    def stop(number: int, frame: FrameType | None) -> None:
        print_line(f"{name} stopping")
        if manner != "stubborn":
            sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    watch_parent(2.0 if manner == "stubborn" else 10.0)
    server = HTTPServer(("127.0.0.1", port), ReadyHandler)
    print_line(
        f"{name} up {os.getpid()} key={os.environ.get('WARMLINE_CLIENT_KEY')} keeper={os.environ.get('WARMLINE_AGENT')}"
    )
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
