"""A backend whose proxy is down: what it holds in memory, the next proxy would take over and store."""

import json
from http.client import HTTPConnection, HTTPException

from warmline_common.settings.resolve import read_setting
from warmline_common.storage.file_lock import find_lock_holder
from warmline_common.storage.home import Home

TIMEOUT_S = 30.0
BACKEND_PORT = 8025  # as in the table of settings


def purge_backend(home: Home) -> str:
    """Have it forget all conversations; why that could not be, "" where it has or where none runs."""
    if not (pid := find_lock_holder(home.backend_lock)):
        return ""
    port = _read_port(home, pid)
    headers = {"Authorization": f"Bearer {home.load_secret()}"}
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/kv/forget", headers=headers)
        if (status := connection.getresponse().status) == 200:
            return ""
        why = f"answered {status}"
    except (OSError, HTTPException) as error:
        why = f"can't be reached on port {port}: {error}"
    finally:
        connection.close()
    return f"the backend, process {pid}, {why}; what it holds in memory may be stored again: restart it"


def _read_port(home: Home, pid: str) -> int:
    """Where that process says that it listens: a flag may have told it so.  Else as in the settings."""
    try:
        told = json.loads((home.run / "backend.json").read_text())
        if str(told["pid"]) == pid:
            return int(told["port"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # it could not write it down
    return int(read_setting(home.root, "backend_port"))
