"""Requests to the proxy, over HTTP and without a retry.  Blocks, at most `TIMEOUT_S` at a time."""

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_common.storage.home import Home
from warmline_run import ports
from warmline_run.address import Address

TIMEOUT_S = 2.0
RESPONSE_BYTES_MAX = 16_000_000
CONNECTION_ERRORS = (OSError, http.client.HTTPException)  # no answer, or no HTTP


@dataclass(frozen=True)
class ProxyReadiness:
    """`reason` is why not; `model` is the served one."""

    is_ready: bool
    reason: str = ""
    model: str = ""


def get(address: Address, path: str, key: str = "") -> tuple[int, dict[str, Any]]:
    """Status and JSON object, {} where the answer is none.  Raises `CONNECTION_ERRORS`."""
    with closing(http.client.HTTPConnection(address.probe_host, address.port, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        body = response.read(RESPONSE_BYTES_MAX)
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    return response.status, answer if isinstance(answer, dict) else {}


def read_readiness(address: Address) -> ProxyReadiness:
    """Answer of GET /ready.  Raises nothing: an unreachable proxy is not ready."""
    try:
        status, answer = get(address, "/ready")
    except ConnectionRefusedError:
        return ProxyReadiness(False, "the proxy does not listen yet")
    except CONNECTION_ERRORS as error:
        return ProxyReadiness(False, f"the proxy does not answer: {error or type(error).__name__}")
    if status == 200:
        return ProxyReadiness(True, model=str(answer.get("model", "")))
    return ProxyReadiness(False, str(answer.get("reason", "")) or f"the proxy answers {status}")


def read_status(address: Address, home: Path) -> dict[str, Any]:
    """Answer of GET /warmline/status; {} where the proxy refuses or another program listens.

    Another program that listens there must not receive the home's secret.
    """
    if not ports.is_listening(home, address.port):
        return {}
    try:
        status, answer = get(address, "/warmline/status", Home(home).read_secret())
    except CONNECTION_ERRORS:
        return {}
    return answer if status == 200 else {}
