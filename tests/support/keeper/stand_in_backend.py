"""Backend process for the keeper's tests: takes its flags, lock and files, answers /health and /kv/memory; no model.

Files in the model's folder say how it behaves: `fails` (exit code 2, with this reason), `crashes` (exit code 1),
`hangs` (stopped before it announces its port, once), `hold_load` (not ready while it exists), `hold_stop` (doesn't end
on SIGTERM while it exists), `in_use` (bytes of KV that can't be evicted).  `events` gets a line for each event.  Its
server is Python's, which is imported in a moment.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

from warmline_common.process.keeper_pipes.announcement import Announcement, Announcer
from warmline_common.process.keeper_pipes.standby import STANDBY_FLAG, read_order, wait_for_release
from warmline_common.process.parent_watch import watch_parent
from warmline_common.protocol.messages import HealthReply, MemoryShare, MemoryShareReply, decode, encode
from warmline_common.storage import disk
from warmline_common.storage.file_lock import process_lock
from warmline_common.storage.home import Home

POLL_S = 0.02


class StandInBackend(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, flags: argparse.Namespace, home: Home) -> None:
        super().__init__(("127.0.0.1", flags.port), BackendHandler)
        self.folder, self.flags, self.home = folder, flags, home
        self._lock, self._kv_bytes = threading.Lock(), flags.memory_share_bytes

    def record(self, kind: str, **more: object) -> None:
        with (self.folder / "events").open("a") as file:
            file.write(json.dumps({"event": kind, "pid": os.getpid(), **more}) + "\n")

    def run(self, announcer: Announcer) -> None:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        share, usable = self.flags.memory_share_bytes, self.flags.memory_usable_bytes
        self.record("start", share=share, usable=usable, limit=self.flags.memory_limit_bytes)
        if (hangs := self.folder / "hangs").exists():
            hangs.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        with suppress(OSError):  # a full disk
            disk.replace_file(self.home.backend_state, json.dumps({"pid": os.getpid(), "port": self.server_port}))
        announcer.announce(Announcement(self.server_port))
        signal.sigwait({signal.SIGTERM})
        self.record("stop")
        while (self.folder / "hold_stop").exists():  # a file has no event
            time.sleep(POLL_S)
        self.record("end")

    def grant(self, share: MemoryShare) -> int:
        with self._lock:
            in_use = self.folder / "in_use"
            used = int(in_use.read_text()) if in_use.exists() else 0
            self._kv_bytes = granted = max(share.kv_bytes, min(used, self._kv_bytes))  # never more than it had
            self.record("memory", kv=granted, usable=share.usable_bytes)
        return granted


class BackendHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert self.path == "/health"
        backend = cast(StandInBackend, self.server)
        reply = HealthReply(
            boot="b",
            pid=os.getpid(),
            ready=not (backend.folder / "hold_load").exists(),
            busy=False,
            steps=0,
            step_age_s=0.0,
            slowest_recent_step_s=0.0,
        )
        self._answer(encode(reply))

    def do_PUT(self) -> None:
        assert self.path == "/kv/memory"
        backend = cast(StandInBackend, self.server)
        assert self.headers["Authorization"] == f"Bearer {backend.home.read_secret()}"
        share = decode(self.rfile.read(int(self.headers["Content-Length"])), MemoryShare)
        self._answer(encode(MemoryShareReply(boot="b", generation=0, kv_bytes=backend.grant(share))))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def run(folder: Path, flags: argparse.Namespace, home: Home) -> int:
    announcer = Announcer()
    if (folder / "crashes").exists():
        return 1
    if (fails := folder / "fails").exists():
        announcer.announce(Announcement(failure=fails.read_text()))
        return 2
    with StandInBackend(folder, flags, home) as backend:
        backend.run(announcer)
    return 0


def main(arguments: list[str]) -> int:
    if arguments == [STANDBY_FLAG]:
        order = read_order(sys.stdin.buffer)
        if order is None or (order.is_held and not wait_for_release(sys.stdin.buffer)):
            return 0
        return main(order.arguments)
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--home", "--instance", "--served-name"):
        parser.add_argument(flag, default="")
    for flag in ("--port", "--memory-share-bytes", "--memory-usable-bytes", "--memory-limit-bytes"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--drain-timeout-s", type=float, default=30.0)
    flags, _ = parser.parse_known_args(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # of all threads: it is waited for
    watch_parent(flags.drain_timeout_s + 15)
    home = Home(Path(flags.home), flags.instance)
    with process_lock(home.backend_lock):  # at once: two of one instance would be a fault
        return run(Path(flags.model), flags, home)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
