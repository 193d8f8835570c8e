"""Who may come in, and how many at once.  All state belongs to the event loop."""

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping

from warmline_proxy.errors import ClientError, bad_request, error_body, queue_full

# Names that a web page's own (rebound) domain can't be: a browser sends the page's name as Host.
LOCAL_NAMES = frozenset({"localhost", "host.docker.internal"})


def bearer(headers: Mapping[str, str]) -> str:
    """The key that a client shows, as OpenAI's or as Anthropic's clients send it; "" where there is none."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")


def same_secret(shown: str, expected: str) -> bool:
    """Constant-time comparison; an empty `expected` equals nothing."""
    return bool(expected) and hmac.compare_digest(_bytes(shown), _bytes(expected))


def check_host(host: str, client_key: str) -> None:
    """Refuse foreign Host names where no key protects the port.  Raises ClientError 403.

    A page in a browser on this machine can point its own domain at 127.0.0.1 (DNS rebinding); it can't forge Host.
    """
    if client_key or not host:
        return
    name = host.rsplit(":", 1)[0] if host.count(":") == 1 else host.partition("]")[0].lstrip("[")
    name = name.lower().rstrip(".")
    if name in LOCAL_NAMES or name.endswith(".localhost") or _is_address(name):
        return
    raise bad_request(f"Host {name!r} is not local; set a client key to serve other names.", status=403)


def check_key(headers: Mapping[str, str], expected: str) -> None:
    """Raises ClientError 401 where a key is expected and another, or none, was shown."""
    if expected and not same_secret(bearer(headers), expected):
        raise ClientError(401, error_body("Incorrect API key provided.", "authentication_error", "invalid_api_key"))


def tenant_of(client_key: str) -> str:
    """Whose KV a request may meet: one tenant without keys, else one a key (a stable hash, never the key)."""
    return hashlib.sha256(client_key.encode()).hexdigest()[:16] if client_key else ""


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")  # header bytes that are no UTF-8 arrive as lone surrogates


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Slot:
    """The right to use the backend.  Given back once, however often `release` is called."""

    def __init__(self, admission: "Admission") -> None:
        self._admission: Admission | None = admission

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission:
            admission._leave()


class Admission:
    """At most `running_count_max` requests at the backend and `queue_count_max` waiting, first come, first served."""

    def __init__(self, running_count_max: int, queue_count_max: int) -> None:
        self._free = asyncio.Semaphore(running_count_max)
        self._queue_count_max = queue_count_max
        self.running = 0
        self.queued = 0

    def check(self) -> None:
        """Raises ClientError 429 where a new request would find the queue full."""
        if self._free.locked() and self.queued >= self._queue_count_max:
            raise queue_full(f"{self.running} requests are running and {self.queued} are waiting; try again soon.")

    async def enter(self) -> Slot:
        """Wait for a slot.  Raises ClientError 429 at once where the queue is full."""
        self.check()
        self.queued += 1
        try:
            await self._free.acquire()
        finally:
            self.queued -= 1
        self.running += 1
        return Slot(self)

    def _leave(self) -> None:
        self.running -= 1
        self._free.release()
