"""Registry of all requests on their way.  Owned by the event loop."""

import asyncio
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TypeVar

from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES
from warmline_proxy.auth.principals import Client
from warmline_proxy.errors import bad_request, request_cancelled
from warmline_proxy.estimate.costs import EngineLoad
from warmline_proxy.models.backend import Backend
from warmline_proxy.planner import RunningRequest, align_to_grid
from warmline_proxy.request.request import Request
from warmline_proxy.tasks import wait_for_events

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1, 60  # OpenAI's SDK obeys up to two minutes
DECODE_TOKENS_PER_S_ASSUMED = 20.0
ANSWER_TOKENS_ASSUMED = 256.0
SMOOTHING = 0.2  # weight of the newest answer
WAIT_SHARED_TOKENS_MIN = BLOCK_TOKENS  # fewer are not worth waiting for another request
SAVE_WAIT_S = 10.0

K = TypeVar("K", bytes, str)


class RequestRegistry:
    """Requests from their first byte until their tail is on disk.

    Those that only wait for their save may be many; what a request costs does not grow with them.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._unsettled: dict[str, Request] = {}  # of these, the ones that the engine may work on
        self._settling: defaultdict[bytes, dict[str, Request]] = defaultdict(dict)  # the others, by their prompt's head
        self._named: defaultdict[str, dict[str, Request]] = defaultdict(dict)  # by the name that the client gave
        self._starts: dict[Request, asyncio.Event] = {}  # in order, with the event of their end
        self._answer_tokens = ANSWER_TOKENS_ASSUMED  # a moving mean
        self.emptied_at = time.monotonic()  # when the last one left that is none in the background
        self._arrival = asyncio.Event()  # replaced at each

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def unsettled(self) -> list[Request]:
        """Requests that the engine may work on, or whose clients still wait."""
        return list(self._unsettled.values())

    def add(self, request: Request) -> Request:
        """Raises ClientError 409 where the client has given the same name to another request on its way.

        The name gets a suffix where that request is ending already, for the client's next try, and where another
        client has chosen the name, since clients learn nothing of each other's requests.
        """
        name = request.log.id
        if (other := self.find(name, request.client)) and other.release_task is None:
            raise bad_request(f"A request named {name!r} is still on its way.", status=409, code="name_taken")
        while request.log.id in self._requests:
            request.log.id = f"{name}.{secrets.token_hex(2)}"
        self._requests[request.log.id] = self._unsettled[request.log.id] = request
        if request.log.client_request_id:
            self._named[request.log.client_request_id][request.log.id] = request
        if not request.is_background:
            self._arrival.set()
            self._arrival = asyncio.Event()
        return request

    def _list_others(self, request: Request) -> list[Request]:
        """Other requests that the same engine may work on."""
        return [each for each in self._unsettled.values() if each is not request and each.shares_backend(request)]

    async def wait_for_arrival(self) -> None:
        """Return at the next request's arrival; one in the background does not count."""
        await self._arrival.wait()

    @property
    def has_foreground(self) -> bool:
        """True while a request is on its way that is none in the background."""
        return any(not request.is_background for request in self._requests.values())

    def mark_settling(self, request: Request) -> None:
        """Record that client and engine are done with a request, which now waits for its save."""
        if self._unsettled.pop(request.log.id, None) is not None:
            self._settling[_get_prompt_head(request)][request.log.id] = request

    def discard(self, request: Request) -> None:
        self._unsettled.pop(request.log.id, None)
        _discard_entry(self._settling, _get_prompt_head(request), request)
        _discard_entry(self._named, request.log.client_request_id, request)
        if self._requests.pop(request.log.id, None) and not (request.is_background or self.has_foreground):
            self.emptied_at = time.monotonic()
        if (result := request.log.generation_result) and result.finish in ("stop", "length"):
            self._answer_tokens += SMOOTHING * (result.timings.decoded - self._answer_tokens)

    def find(self, name: str, client: Client | None) -> Request | None:
        """This client's request of that id or given name; of several tries under one name, one that is not ending.

        `client`: None for the owner, who may see those of all clients.
        """
        found = dict(self._named[name]) if name in self._named else {}
        if name in self._requests:
            found[name] = self._requests[name]
        matches = [request for request in found.values() if client is None or request.client == client]
        return next((request for request in matches if request.release_task is None), next(iter(matches), None))

    @property
    def unanswered_count(self) -> int:
        """Requests whose clients still wait; the choices of a request count as one."""
        branch_ids = {branch.log.id for request in self for branch in request.branches}
        return sum(not request.response_done.is_set() and request.log.id not in branch_ids for request in self)

    @property
    def saving_count(self) -> int:
        """Requests that are computed, but not yet on disk."""
        return sum(request.is_saving for request in self)

    @contextmanager
    def track_start(self, request: Request) -> Iterator[None]:
        """Scope in which a request is planned and restored; then it is sent to the backend, or has failed."""
        self._starts[request] = ended = asyncio.Event()
        try:
            yield
        finally:
            del self._starts[request]
            ended.set()

    def find_followable(self, request: Request, refused_ids: Collection[str] = ()) -> list[RunningRequest]:
        """Requests whose prefill this one could share, without those of the `refused_ids`.

        They were sent to the backend, or began to start before this one, so that no two wait for each other.
        """
        others = (each for each in self._list_others(request) if each.log.id not in refused_ids)
        earlier = set(takewhile(lambda each: each is not request, self._starts))
        leaders = (each for each in others if each.can_lead or (each in earlier and each.is_cacheable))
        return [each.as_running(request) for each in leaders if each.started or not self._follows(each, request)]

    def _follows(self, follower: Request, request: Request) -> bool:
        """True if a request was to follow this one, or another one that was."""
        seen = {follower}
        while (plan := follower.log.plan) and (leader := self._requests.get(plan.leader_id)) and leader not in seen:
            if leader is request:
                return True
            seen.add(leader)
            follower = leader
        return False

    async def wait_for_start(self, request_id: str) -> bool:
        """Wait until a request is sent to the backend, or has failed; False, at once, where it is not being planned."""
        request = self._requests.get(request_id)
        if request is None or (ended := self._starts.get(request)) is None:
            return False
        await ended.wait()
        return True

    def describe_load(self, request: Request) -> EngineLoad:
        """Describe this request's wait so far, and the work of the others at the backend, or on their way there."""
        others = [each for each in self._list_others(request) if each.loads_engine]
        prefills = [each.describe_prefill_left() for each in others if not each.log.ttft_s]
        return EngineLoad(request.log.waited_s, prefills, len(others) - len(prefills))

    async def cancel_superseded(self, request: Request) -> None:
        """Cancel the client's earlier try, whose connection is not known to be dead yet, and wait for its release.

        Several candidates may be several samples of one prompt: none is cancelled then.
        """
        if not (request.call and request.call.retry_count):
            return
        earlier = [each for each in self.unsettled if each.release_task is None and each.is_retried_by(request)]
        if len(earlier) == 1:
            message = "The client has sent this request again; this try is cancelled."
            earlier[0].cancel(request_cancelled(message, cancel_source="superseded"))
            await earlier[0].released.wait()

    async def wait_for_releases(self, request: Request) -> None:
        """Wait for cancelled requests with the same prefix: a step later their rows can be continued from.

        Raises UpstreamError.
        """
        await request.backend.state.wait_for_predecessor_releases()
        shared = {each.released: request.count_shared_tokens(each) for each in self.unsettled if each.is_releasing}
        await asyncio.gather(*[each.wait() for each, tokens in shared.items() if tokens >= WAIT_SHARED_TOKENS_MIN])

    async def wait_for_saves(self, request: Request, count_reusable_tokens: Callable[[Request], int]) -> None:
        """Wait for saves in progress that would give more than can be reused now, for SAVE_WAIT_S at most.

        A resident that can't go on at the shared position can be restored there once it is saved.
        """
        settling = self._settling.get(_get_prompt_head(request), {})
        others = [each for each in (*settling.values(), *self.unsettled) if each is not request]
        shared = {each: request.count_shared_tokens(each) for each in others if each.log.generation_result}
        if saving := {each: tokens for each, tokens in shared.items() if tokens >= WAIT_SHARED_TOKENS_MIN}:
            tokens_min = count_reusable_tokens(request) + WAIT_SHARED_TOKENS_MIN
            grid = request.layout.grid if request.layout else 0
            events = [other.saved for other, shared in saving.items() if align_to_grid(shared, grid) >= tokens_min]
            await wait_for_events(events, SAVE_WAIT_S)

    def estimate_retry_after_s(self, backend: Backend) -> int:
        """Seconds until the first of a backend's running requests may be done, by the measured rates."""
        own = (request for request in self.unsettled if request.assigned_backend is backend)
        running = (request for request in own if request.ticket and request.ticket.is_running)
        left_s = min((self._estimate_seconds_left(request) for request in running), default=0.0)
        return min(max(math.ceil(left_s), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)

    def _estimate_seconds_left(self, request: Request) -> float:
        state = request.backend.state
        answer_s = self._answer_tokens / (state.decode_tokens_per_s or DECODE_TOKENS_PER_S_ASSUMED)
        if request.log.ttft_s:
            return max(0.0, answer_s - (time.monotonic() - request.log.arrived_monotonic - request.log.ttft_s))
        return answer_s + state.costs().estimate_prefill_s(request.prefilled_tokens, request.log.prompt_tokens)


def _get_prompt_head(request: Request) -> bytes:
    """Tokens that all prompts have which share enough of it to wait for it; without a prompt b""."""
    return request.root + request.prompt.tokens[: WAIT_SHARED_TOKENS_MIN * TOKEN_BYTES] if request.prompt else b""


def _discard_entry(groups: defaultdict[K, dict[str, Request]], key: K, request: Request) -> None:
    """Remove a request from its group, and a group that is empty."""
    if (group := groups.get(key)) is not None:
        group.pop(request.log.id, None)
        if not group:
            del groups[key]
