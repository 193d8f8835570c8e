"""Gate of a model's backend: requests that use it, and those that wait until it is loaded.  Owned by the event loop."""

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf

from warmline_proxy.errors import ClientError, too_many_requests

RETRY_AFTER_S = 10  # about what a load takes


@dataclass(frozen=True)
class GateWait:
    """A request that waits, since `since` (time.monotonic()), for a model with so much memory for KV.

    `may_swap`: other models may be unloaded for it, since it names a configured one; `is_owners`: and at once, since
    the models' owner asks for it.
    """

    since: float
    kv_bytes: int = 0
    may_swap: bool = True
    is_owners: bool = False


class ModelGate:
    """Requests enter before they use a model, and leave once they are saved; meanwhile it stays loaded.

    `ModelSwitcher` opens the gate of a loaded model, and closes it before the model is unloaded: new requests wait
    then, and those inside go on.  The gate of a pair of one model is open for ever.
    """

    def __init__(
        self, *, is_open: bool = True, waiting_count_max: int = 0, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.is_open, self.waiting_count_max = is_open, waiting_count_max
        self.kv_bytes: float = inf  # present budget of the model for KV
        self.find_refusal: Callable[[GateWait], ClientError | None] = lambda _: None  # the model can't be loaded for it
        self.last_used_at = 0.0  # time.time(); 0.0: never
        self.down_since: float | None = None  # time.monotonic(); None while the model could be loaded
        self.down_reason = ""
        self.wait_reason = ""  # why the model is not loaded yet, for those that wait; "" where it is being loaded
        self.progressed_at = 0.0  # time.monotonic() when a load was last seen to go on
        self.users: dict[Hashable, int] = {}  # with the KV bytes that each needs, as far as is known
        self.waiting: dict[Hashable, GateWait] = {}  # the longest wait first
        self._on_change = on_change
        self._moved = asyncio.Event()  # replaced whenever waiting requests have to look again

    def try_enter(self, user: Hashable, kv_bytes: int = 0) -> bool:
        """Use the model until `leave`, where the gate is open and the budget large enough; else False."""
        if user in self.users and kv_bytes <= self.kv_bytes:
            self.users[user] = max(kv_bytes, self.users[user])
            return True
        if not self.is_open or kv_bytes > self.kv_bytes:
            return False
        self.users[user] = kv_bytes
        self.last_used_at = time.time()
        self._on_change()
        return True

    async def enter(self, user: Hashable, kv_bytes: int = 0, *, may_swap: bool = True, is_owners: bool = False) -> None:
        """Wait until `try_enter` succeeds; meanwhile the model is not used.

        Raises ClientError: 429 where too many wait, others where it can't be loaded.
        """
        if self.try_enter(user, kv_bytes):
            return
        waiting_count = sum(not wait.is_owners for wait in self.waiting.values())
        if waiting_count >= self.waiting_count_max and not is_owners:
            raise too_many_requests(f"{waiting_count} requests wait for the model; try again later.", RETRY_AFTER_S)
        self.leave(user)
        wait = self.waiting[user] = GateWait(time.monotonic(), kv_bytes, may_swap, is_owners)
        self._on_change()
        try:
            while not self.try_enter(user, kv_bytes):
                if (refusal := self.find_refusal(wait)) is not None:
                    raise refusal
                await self._moved.wait()
        finally:
            del self.waiting[user]
            self._on_change()

    def measure_outage_s(self, wait: GateWait, now: float) -> float:
        """Seconds of a wait in which the model could not be loaded; 0.0 while it can be."""
        return now - max(wait.since, self.down_since) if self.down_since is not None else 0.0

    def leave(self, user: Hashable) -> None:
        """End a use; does nothing where there was none."""
        if self.users.pop(user, None) is not None:
            self.last_used_at = time.time()
            self._on_change()

    def allow(self, kv_bytes: float = inf) -> None:
        """Open the gate, to requests that need at most so much memory for KV."""
        self.is_open, self.kv_bytes = True, kv_bytes
        self.look_again()

    def close(self) -> None:
        self.is_open = False

    def look_again(self) -> None:
        """Have the waiting requests look whether they may enter, or are refused."""
        self._moved.set()
        self._moved = asyncio.Event()
