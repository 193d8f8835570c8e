"""All requests on their way.  Owned by the event loop."""

import math
import secrets
import time
from collections.abc import Collection, Iterator

from warmline_proxy.auth.principals import Client
from warmline_proxy.errors import bad_request
from warmline_proxy.planner import RunningRequest, estimate_prefill_s
from warmline_proxy.request.request import Request
from warmline_proxy.upstream.backend_state import BackendState

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1, 60  # OpenAI's SDK obeys up to two minutes
DECODE_TOKENS_PER_S_ASSUMED = 20.0
ANSWER_TOKENS_ASSUMED = 256.0
SMOOTHING = 0.2  # weight of the newest answer


class RequestRegistry:
    """From a request's first byte to its tail's last byte on disk."""

    def __init__(self, backend_state: BackendState) -> None:
        self._requests: dict[str, Request] = {}
        self._backend_state = backend_state
        self._answer_tokens = ANSWER_TOKENS_ASSUMED  # a mean

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> Request:
        """Raises ClientError 409 where its client gave it a name that another one has.

        One that its client has left, and now tries again, may still be ending under that name: the next try gets a
        longer one.  So does one whose name another client has chosen, too: nobody is told of others' requests.
        """
        name = request.log.id
        if (other := self.find(name, request.client)) and other.release_task is None:
            raise bad_request(f"A request named {name!r} is still on its way.", status=409, code="name_taken")
        while request.log.id in self._requests:
            request.log.id = f"{name}.{secrets.token_hex(2)}"
        self._requests[request.log.id] = request
        return request

    def discard(self, request: Request) -> None:
        self._requests.pop(request.log.id, None)
        if (settled := request.log.generation_result) and settled.finish in ("stop", "length"):
            self._answer_tokens += SMOOTHING * (settled.timings.decoded - self._answer_tokens)

    def find(self, name: str, client: Client) -> Request | None:
        """Of this client's: by its id, or the one that was given; of several tries under one name, the one wanted."""
        own = (life for life in self if life.client == client)
        matches = [life for life in own if name and name in (life.log.id, life.log.client_request_id)]
        return next((life for life in matches if life.release_task is None), next(iter(matches), None))

    @property
    def unanswered_count(self) -> int:
        """Requests whose clients still wait.  Several choices of one are one."""
        branch_ids = {part.log.id for life in self for part in life.branches}
        return sum(not life.response_done.is_set() and life.log.id not in branch_ids for life in self)

    @property
    def saving_count(self) -> int:
        """Requests that are computed, but not yet on disk."""
        return sum(life.is_saving for life in self)

    def find_followable(self, request: Request, refused_ids: Collection[str] = ()) -> list[RunningRequest]:
        """What the backend is computing that this request could share; without the `refused`, by their ids."""
        others = (each for each in self if each is not request and each.log.id not in refused_ids)
        return [each.as_running(request) for each in others if each.is_computing and not each.suspect]

    def estimate_retry_after_s(self) -> int:
        """When the first of the running requests may be done, by the measured rates."""
        running = (life for life in self if life.ticket and life.ticket.is_running)
        left_s = min((self._estimate_seconds_left(life) for life in running), default=0.0)
        return min(max(math.ceil(left_s), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)

    def _estimate_seconds_left(self, request: Request) -> float:
        rate = self._backend_state.decode_tokens_per_s or DECODE_TOKENS_PER_S_ASSUMED
        answer_s = self._answer_tokens / rate
        if request.log.ttft_s:
            return max(0.0, answer_s - (time.monotonic() - request.log.arrived_monotonic - request.log.ttft_s))
        return answer_s + estimate_prefill_s(
            request.prefilled_tokens, request.log.prompt_tokens, self._backend_state.costs().prefill
        )
