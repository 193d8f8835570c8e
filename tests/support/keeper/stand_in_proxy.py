"""Proxy for tests of `warmline serve` with several models: answers GET /ready, ends on SIGTERM."""

import argparse
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from warmline_common.process.parent_watch import watch_parent


class ReadyHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--models", default="[]")
    flags, _ = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    watch_parent(10.0)
    server = HTTPServer(("127.0.0.1", flags.port), ReadyHandler)
    os.write(1, f"proxy up {os.getpid()} models={flags.models}\n".encode())  # one write: others print there, too
    server.serve_forever()
