"""Asking the proxy, over HTTP and at once.  Blocks, at most `TIMEOUT_S` at a time."""

import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_run import ports
from warmline_run.address import Address

TIMEOUT_S = 2.0
RESPONSE_BYTES_MAX = 16_000_000
CONNECTION_ERRORS = (OSError, http.client.HTTPException)  # nobody answers, or no HTTP


@dataclass(frozen=True)
class ProxyReadiness:
    """`reason` is why not; `model` what is served."""

    is_ready: bool
    reason: str = ""
    model: str = ""


def get(address: Address, path: str, key: str = "") -> tuple[int, dict[str, Any]]:
    """Status and JSON object, {} where the answer is none.  Raises what is in `FAILURES`."""
    connection = http.client.HTTPConnection(address.probe_host, address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        return answer.status, _parse_object(answer.read(RESPONSE_BYTES_MAX))
    finally:
        connection.close()


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def read_readiness(address: Address) -> ProxyReadiness:
    """Answer of GET /ready.  Raises nothing: an unreachable proxy is not ready."""
    try:
        status, told = get(address, "/ready")
    except ConnectionRefusedError:
        return ProxyReadiness(False, "the proxy does not listen yet")
    except CONNECTION_ERRORS as error:
        return ProxyReadiness(False, f"the proxy does not answer: {error or type(error).__name__}")
    if status == 200:
        return ProxyReadiness(True, model=str(told.get("model", "")))
    return ProxyReadiness(False, str(told.get("reason", "")) or f"the proxy answers {status}")


def read_status(address: Address, home: Path) -> dict[str, Any]:
    """Answer of GET /warmline/status; {} where the proxy refuses or another program listens.

    Another program that listens there must not receive the home's secret.
    """
    if not ports.is_listening(home, address.port):
        return {}
    try:
        status, told = get(address, "/warmline/status", (home / "secret").read_text().strip())
    except (
        *CONNECTION_ERRORS,
        ValueError,
    ):  # http.client refuses a header with a line's end in it, and text may be none
        return {}
    return told if status == 200 else {}


def needs_key(address: Address, home: Path) -> bool:
    """True where a client without a key is refused; False where the proxy does not say."""
    return read_status(address, home).get("needs_key") is True
