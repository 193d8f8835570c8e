"""Purge without a proxy while a backend still runs: the backend is notified."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from support.index.indexes import plan_save, save, write_plan
from warmline_cachectl import client
from warmline_common.storage.file_lock import process_lock
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.store.files import list_stored
from warmline_proxy.store.rows import PurgeRequest


class RecordingBackend(HTTPServer):
    """Backend that records its requests, and answers with `status` and `body`."""

    status, body, health = 200, b"", b"{}"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        self.requests: list[tuple[str, str]] = []


class RecordingHandler(BaseHTTPRequestHandler):
    server: RecordingBackend

    def do_POST(self) -> None:
        self.server.requests.append((self.path, self.headers["Authorization"]))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(self.server.health)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.prepare()
    with Index(home, 1 << 30):
        return home


@contextmanager
def run_backend(home: Home) -> Iterator[RecordingBackend]:
    """Serve in a thread while the home's backend lock is held."""
    with RecordingBackend() as backend:
        thread = threading.Thread(target=backend.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with process_lock(home.backend_lock):
            yield backend
        backend.shutdown()
        thread.join()


def announce(home: Home, backend: RecordingBackend) -> None:
    home.backend_state.write_text(json.dumps({"pid": os.getpid(), "port": backend.server_address[1]}))


@pytest.fixture
def backend(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingBackend]:
    with run_backend(home) as backend:
        monkeypatch.setenv("WARMLINE_BACKEND_PORT", str(backend.server_address[1]))
        yield backend


def test_purge_clears_backend_memory(home: Home, backend: RecordingBackend) -> None:
    client.purge(home, PurgeRequest(everything=True, dry_run=True))
    assert backend.requests == []
    client.purge(home, PurgeRequest(everything=True))
    assert backend.requests == [("/kv/forget", f"Bearer {home.load_secret()}")]


def test_purge_finds_backend_on_flag_port(
    home: Home, backend: RecordingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMLINE_BACKEND_PORT", "9")
    place = {"pid": os.getpid(), "port": backend.server_address[1]}
    (home.run / "backend.json").write_text(json.dumps(place))
    client.purge(home, PurgeRequest(everything=True))
    assert len(backend.requests) == 1
    (home.run / "backend.json").write_text(json.dumps({**place, "pid": 1}))  # of another one, before it
    with pytest.raises(client.OperationRefusedError, match="can't be reached on port 9"):
        client.purge(home, PurgeRequest(everything=True))


def test_purge_clears_memory_of_each_loaded_model(home: Home) -> None:
    first, second, unloaded = (Home(home.root, name) for name in ("large", "qwen3.5", "unloaded"))
    unloaded.backend_lock.touch()
    with run_backend(home) as keeper, run_backend(first) as large, run_backend(second) as small:
        keeper.health = b'{"keeper": true, "pid": 1}'
        for each, server in ((home, keeper), (first, large), (second, small)):
            announce(each, server)
        client.purge(home, PurgeRequest(everything=True))
        expected = [("/kv/forget", f"Bearer {home.load_secret()}")]
        assert (keeper.requests, large.requests, small.requests) == ([], expected, expected)
        large.status = 503
        second.backend_state.unlink()
        with pytest.raises(client.OperationRefusedError) as caught:
            client.purge(home, PurgeRequest(everything=True))
    pid = os.getpid()
    assert f"the backend of large, process {pid}, answered 503; its KV" in str(caught.value)
    assert f"the backend of qwen3.5, process {pid}, has not announced its port; its KV" in str(caught.value)


def test_purge_beside_keeper_without_loaded_models(home: Home, backend: RecordingBackend) -> None:
    backend.health = b'{"keeper": true, "pid": 1}'
    client.purge(home, PurgeRequest(everything=True))
    assert backend.requests == []


def test_purge_names_backend_that_refuses(home: Home, backend: RecordingBackend) -> None:
    backend.status = 503
    with pytest.raises(
        client.OperationRefusedError, match=rf"gone from the disk, but the backend, process {os.getpid()}, answered 503"
    ):
        client.purge(home, PurgeRequest(everything=True))
    with Index(home, 1 << 30) as index:
        assert index.has_purge_notice(), "the next proxy tells it"
    backend.status = 200
    client.purge(home, PurgeRequest(everything=True))
    with Index(home, 1 << 30) as index:
        assert not index.has_purge_notice()


def test_proxy_refusal_is_quoted_and_foreign_server_named(home: Home, backend: RecordingBackend) -> None:
    url = f"http://127.0.0.1:{backend.server_address[1]}"
    (home.run / "proxy.json").write_text(json.dumps({"url": url, "pid": os.getpid()}))
    backend.status = 409
    with process_lock(home.lock):
        for body, message in (
            (b'{"error": {"message": "there is no room", "type": "invalid_request_error"}}', "there is no room"),
            (b"<h1>Conflict</h1>", f"the proxy at {url} answered 409: <h1>Conflict</h1>"),
        ):
            backend.body = body
            with pytest.raises(client.OperationRefusedError) as refused:
                client.purge(home, PurgeRequest(everything=True))
            assert str(refused.value) == message


def test_purge_removes_drafts_of_killed_pair(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        reconcile(index)
        session = save(index, [5] * 100).session
        kept = index.segments()[0].id
        plan = plan_save(index, [5] * 100 + [6] * 2000)
        write_plan(home, plan)
    draft = home.segment_file(kept).with_name(".ab.0123.tmp")
    draft.write_bytes(b"rows")
    client.purge(home, PurgeRequest(session=session, dry_run=True))
    assert len(list(list_stored(home))) == 3
    client.purge(home, PurgeRequest(older_than_s=3600.0))
    assert [file_id for file_id, _ in list_stored(home)] == [kept]
    with Index(home, 1 << 30) as index:
        assert index.totals().bytes_writing == 0


def test_purge_accepts_ended_backend(home: Home) -> None:
    """Its number is another process's by now: a machine has started anew."""
    with process_lock(home.backend_lock):
        pass
    home.pid_file("backend").write_text(f"{os.getpid()}\n")
    assert client.purge(home, PurgeRequest(everything=True)).sessions == []
