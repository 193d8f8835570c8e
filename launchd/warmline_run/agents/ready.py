"""Whether a proxy serves, as it tells itself (GET /ready)."""

import http.client
import json
from dataclasses import dataclass

from warmline_run.address import Address
from warmline_run.supervise import PROBE_TIMEOUT_S


@dataclass(frozen=True)
class Readiness:
    """`reason` is why not; `model` what is served."""

    ready: bool
    reason: str = ""
    model: str = ""


def ask(address: Address) -> Readiness:
    """Raises nothing: a proxy that can't be asked is not ready."""
    connection = http.client.HTTPConnection(address.probe_host, address.port, timeout=PROBE_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {address.key}"} if address.key else {}
    try:
        connection.request("GET", "/ready", headers=headers)
        answer = connection.getresponse()
        return read(answer.status, answer.read())
    except ConnectionRefusedError:
        return Readiness(False, "the proxy does not listen yet")
    except (OSError, http.client.HTTPException) as error:
        return Readiness(False, f"the proxy does not answer: {error or type(error).__name__}")
    finally:
        connection.close()


def read(status: int, body: bytes) -> Readiness:
    try:
        told = json.loads(body)
    except ValueError:
        told = {}
    told = told if isinstance(told, dict) else {}
    if status == 200:
        return Readiness(True, model=str(told.get("model", "")))
    return Readiness(False, str(told.get("reason", "")) or f"the proxy answers {status}")
