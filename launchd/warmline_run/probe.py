"""Requests to the proxy, over HTTP and without a retry.  Blocks, `TIMEOUT_S` at a time where nothing else is said."""

import http.client
import json
from collections.abc import Mapping
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


def send(
    address: Address,
    path: str,
    key: str = "",
    body: Mapping[str, object] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, dict[str, Any]]:
    """Status and JSON object, {} where the answer is none: of a POST with a body, else of a GET.

    Raises `CONNECTION_ERRORS`.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    headers |= {} if data is None else {"Content-Type": "application/json"}
    with closing(http.client.HTTPConnection(address.probe_host, address.port, timeout=timeout_s)) as connection:
        connection.request("GET" if data is None else "POST", path, body=data, headers=headers)
        response = connection.getresponse()
        answer_body = response.read(RESPONSE_BYTES_MAX)
    try:
        answer = json.loads(answer_body)
    except ValueError:
        answer = None
    return response.status, answer if isinstance(answer, dict) else {}


def read_readiness(address: Address) -> ProxyReadiness:
    """Answer of GET /ready.  Raises nothing: an unreachable proxy is not ready."""
    try:
        status, answer = send(address, "/ready")
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
        status, answer = send(address, "/warmline/status", Home(home).read_secret())
    except CONNECTION_ERRORS:
        return {}
    return answer if status == 200 else {}
