"""Stand-in of a proxy's routes for models, which holds a home as a proxy does."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

from warmline_common.storage.file_lock import process_lock
from warmline_common.storage.home import Home

GB = 10**9


def make_model(name: str, **fields: Any) -> dict[str, Any]:
    """Model as the proxy lists it."""
    sizes = {"weight_bytes": 0, "need_bytes": 0, "held_bytes": 0, "kv_bytes": 0}
    return {
        **{"name": name, "aliases": [], "default": False, "stage": "unloaded", "pinned": False, "idle_s": 0.0},
        **sizes,
        **{"running": 0, "waiting": 0, "last_used_at": 0.0, "load_s": 0.0, "reason": "", "wait_reason": ""},
        **fields,
    }


@dataclass
class ModelsProxy:
    """State of the stand-in: the models, and each request as (path, body)."""

    home: Home
    models: list[dict[str, Any]]
    keeper: bool = True
    requests: list[tuple[str, Any]] = field(default_factory=list)  # but those for the list

    def answer(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a request."""
        self.requests += [(path, body)] if body is not None else []
        _, _, name, verb = path.removeprefix("/warmline").split("/") if body is not None else ("", "", "", "ls")
        if verb != "ls" and not self.keeper:
            return 409, make_error("one model is configured: it stays loaded", "one_model")
        if verb == "ls":
            return 200, self.list_models()
        model = next((each for each in self.models if unquote(name) in (each["name"], *each["aliases"])), None)
        if model is None:
            return 404, make_error(f"there is no model {unquote(name)}", "model_not_found")
        if verb == "unload" and model["pinned"]:
            return 409, make_error(f"{model['name']} is pinned", "model_pinned")
        if verb == "load" and model["need_bytes"] > 100 * GB:
            return 400, make_error(f"{model['name']} needs 400 GB, there are 100 GB", "model_too_large")
        if verb == "pin":
            model["pinned"] = body["pinned"]
        else:
            model["stage"] = "unloaded" if verb == "unload" else "loaded" if body["wait"] else "starting"
        return 200, self.list_models()

    def list_models(self) -> dict[str, Any]:
        return {"memory_bytes": 100 * GB, "keeper": self.keeper, "models": self.models}


def make_error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


@contextmanager
def run_models_proxy(home: Home, *models: dict[str, Any], keeper: bool = True) -> Iterator[ModelsProxy]:
    """Serve the routes on a free port, in a thread, while the home's lock is held."""
    home.prepare()
    proxy, secret = ModelsProxy(home, list(models), keeper), home.load_secret()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            allowed = self.headers["Authorization"] == f"Bearer {secret}"
            status, answer = proxy.answer(self.path, body) if allowed else (401, make_error("no secret", "no_key"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    announcement = {"pid": os.getpid(), "url": f"http://127.0.0.1:{server.server_port}"}
    (home.run / "proxy.json").write_text(json.dumps(announcement))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with process_lock(home.lock):
            yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_dead_announcement(folder: Path, port: int) -> None:
    """Write the announcement that a killed proxy leaves behind."""
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "proxy.json").write_text(json.dumps({"pid": 1, "url": f"http://127.0.0.1:{port}"}))
