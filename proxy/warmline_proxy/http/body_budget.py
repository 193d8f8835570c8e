"""Memory that the bodies of all requests share.  Event loop thread.

A body counts from its first byte until the answer to its request is sent, since its fields, and an answer that repeats
them, are kept as long; so do stored items that the request refers to.  Where a body does not fit, one that is still
being received makes way: of the caller that has the most, first one that makes no progress, then the largest.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection

from warmline_common.protocol.json_structure import JsonStructure
from warmline_proxy.errors import ClientError, bad_request, service_unavailable

IDLE_AFTER_S = 1.0  # without a byte
CALLER_SHARE_MAX = 0.75  # of the budget, for one caller


class RequestBody:
    """Body of one request, while it is received and until the request is answered, with the stored items it names."""

    def __init__(self, budget: "BodyBudget", caller: str, clock: Callable[[], float]) -> None:
        self.caller = caller
        self.counted_bytes = 0
        self.structure = JsonStructure()
        self.is_received = False
        self.is_displaced = False
        self.on_displaced: Callable[[], object] = bool  # wakes its reader
        self._budget, self._clock, self._data = budget, clock, bytearray()
        self._progressed_at = clock()

    @property
    def is_idle(self) -> bool:
        return self._clock() - self._progressed_at >= IDLE_AFTER_S

    @property
    def size(self) -> int:
        return len(self._data)

    def append(self, part: bytes, parsed_bytes: int) -> None:
        """Add a part, whose values take `parsed_bytes` beside its text.  Raises ClientError 503."""
        self.count(len(part) + parsed_bytes)
        self._progressed_at = self._clock()
        self._data += part

    def count(self, size: int) -> None:
        """Count bytes that the request keeps beside its parts.  Raises ClientError 503, or 413 where they never fit."""
        self.check_kept()
        self._budget.count(self, size)

    def discount(self, size: int) -> None:
        """Count bytes no more: they are free again."""
        self._budget.discount(self, size)

    def take(self) -> bytes:
        """The whole body, which no other displaces from now on.  Raises ClientError 503 where one has."""
        self.check_kept()
        data, self._data, self.is_received = bytes(self._data), bytearray(), True
        return data

    def check_kept(self) -> None:
        """Raises ClientError 503 where the body had to make way."""
        if self.is_displaced:
            raise bodies_full()

    def displace(self) -> None:
        """Make way for another body: the memory is free at once, the reader notices later."""
        self.is_displaced = True
        self.release()
        self.on_displaced()

    def release(self) -> None:
        """End; idempotent."""
        self._data = bytearray()
        self._budget.discard(self)


class BodyBudget:
    """At most `bytes_max` of bodies, and one caller's at most its share of that."""

    def __init__(self, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_max, self._clock = bytes_max, clock
        self._bodies: set[RequestBody] = set()
        self._bytes_by_caller: Counter[str] = Counter()

    @property
    def caller_bytes_max(self) -> int:
        return int(self._bytes_max * CALLER_SHARE_MAX)

    @property
    def counted_bytes(self) -> int:
        return self._bytes_by_caller.total()

    def open_body(self, caller: str) -> RequestBody:
        body = RequestBody(self, caller, self._clock)
        self._bodies.add(body)
        return body

    def count(self, body: RequestBody, count: int) -> None:
        """Count bytes of a body; others make way where they do not fit.  Raises ClientError 503 or 413."""
        if body.counted_bytes + count > self.caller_bytes_max:
            raise body_too_large(self.caller_bytes_max)
        while not self._has_room(body, count):
            if (other := find_displaced(self._find_rivals(body, count), self._bytes_by_caller, body, count)) is None:
                raise bodies_full()
            other.displace()
        body.counted_bytes += count
        self._bytes_by_caller[body.caller] += count

    def discount(self, body: RequestBody, count: int) -> None:
        if body in self._bodies:
            body.counted_bytes -= count
            self._bytes_by_caller[body.caller] -= count
            self._bytes_by_caller += Counter()  # drops zeros

    def discard(self, body: RequestBody) -> None:
        self.discount(body, body.counted_bytes)
        self._bodies.discard(body)

    def _has_room(self, body: RequestBody, count: int) -> bool:
        has_share = self._bytes_by_caller[body.caller] + count <= self.caller_bytes_max
        return has_share and self.counted_bytes + count <= self._bytes_max

    def _find_rivals(self, body: RequestBody, count: int) -> list[RequestBody]:
        """Bodies in the way: of all callers, or of a caller that has used up its share."""
        exceeds_share = self._bytes_by_caller[body.caller] + count > self.caller_bytes_max
        return [each for each in self._bodies if not exceeds_share or each.caller == body.caller]


def find_displaced(
    bodies: Collection[RequestBody], bytes_by_caller: Counter[str], newcomer: RequestBody, count: int
) -> RequestBody | None:
    """Body that makes way for `count` bytes of another; None where none should.

    A caller's body yields to its other bodies where it is idle or larger, to other callers' bodies where its caller
    has more.
    """
    unfinished = [body for body in bodies if body is not newcomer and not body.is_received and body.counted_bytes]

    def rank(body: RequestBody) -> tuple[int, bool, int]:
        return bytes_by_caller[body.caller], body.is_idle, body.counted_bytes

    if not unfinished:
        return None
    other = max(unfinished, key=rank)
    if other.caller == newcomer.caller:
        yields = (other.is_idle, other.counted_bytes) > (False, newcomer.counted_bytes + count)
    else:
        yields = bytes_by_caller[other.caller] > bytes_by_caller[newcomer.caller] + count
    return other if yields else None


def body_too_large(bytes_max: int) -> ClientError:
    message = (
        f"The request takes more memory than one client may have here, {bytes_max} bytes, with its JSON's values and "
        "the stored items that it refers to."
    )
    return bad_request(message, status=413)


def bodies_full() -> ClientError:
    message = "The proxy has no memory for this body now, beside those of other requests; try again soon."
    return service_unavailable(message, "bodies_full")
