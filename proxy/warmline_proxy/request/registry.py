"""All requests on their way.  Owned by the event loop."""

import math
import secrets
import time
from collections.abc import Collection, Iterator

from warmline_proxy.auth.principals import Client
from warmline_proxy.errors import bad_request
from warmline_proxy.planner import Running, prefill_seconds
from warmline_proxy.request.request import Life
from warmline_proxy.upstream.backend_state import Knowledge

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1, 60  # OpenAI's SDK obeys up to two minutes
DECODE_TOKENS_PER_S_ASSUMED = 20.0
ANSWER_TOKENS_ASSUMED = 256.0
SMOOTHING = 0.2  # weight of the newest answer


class Lives:
    """From a request's first byte to its tail's last byte on disk."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._lives: dict[str, Life] = {}
        self._knowledge = knowledge
        self._answer_tokens = ANSWER_TOKENS_ASSUMED  # a mean

    def __iter__(self) -> Iterator[Life]:
        return iter(list(self._lives.values()))

    def __len__(self) -> int:
        return len(self._lives)

    def add(self, life: Life) -> Life:
        """Raises ClientError 409 where its client gave it a name that another one has.

        One that its client has left, and now tries again, may still be ending under that name: the next try gets a
        longer one.  So does one whose name another client has chosen, too: nobody is told of others' requests.
        """
        name = life.trace.id
        if (other := self.find(name, life.client)) and other.leaving is None:
            raise bad_request(f"A request named {name!r} is still on its way.", status=409, code="name_taken")
        while life.trace.id in self._lives:
            life.trace.id = f"{name}.{secrets.token_hex(2)}"
        self._lives[life.trace.id] = life
        return life

    def discard(self, life: Life) -> None:
        self._lives.pop(life.trace.id, None)
        if (settled := life.trace.settled) and settled.finish in ("stop", "length"):
            self._answer_tokens += SMOOTHING * (settled.timings.decoded - self._answer_tokens)

    def find(self, name: str, client: Client) -> Life | None:
        """Of this client's: by its id, or the one that was given; of several tries under one name, the one wanted."""
        own = (life for life in self if life.client == client)
        named = [life for life in own if name and name in (life.trace.id, life.trace.given_id)]
        return next((life for life in named if life.leaving is None), next(iter(named), None))

    @property
    def unanswered(self) -> int:
        """Requests whose clients still wait.  Several choices of one are one."""
        parts = {part.trace.id for life in self for part in life.parts}
        return sum(not life.answered.is_set() and life.trace.id not in parts for life in self)

    @property
    def settling(self) -> int:
        """Requests that are computed, but not yet on disk."""
        return sum(life.is_settling for life in self)

    def to_follow(self, life: Life, refused: Collection[str] = ()) -> list[Running]:
        """What the backend is computing that this request could share; without the `refused`, by their ids."""
        others = (each for each in self if each is not life and each.trace.id not in refused)
        return [each.as_running(life) for each in others if each.is_computing and not each.suspect]

    def retry_after_s(self) -> int:
        """When the first of the running requests may be done, by the measured rates."""
        holders = (life for life in self if life.ticket and life.ticket.runs)
        left = min((self._seconds_left(life) for life in holders), default=0.0)
        return min(max(math.ceil(left), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)

    def _seconds_left(self, life: Life) -> float:
        rate = self._knowledge.decode_tokens_per_s or DECODE_TOKENS_PER_S_ASSUMED
        answering = self._answer_tokens / rate
        if life.trace.ttft_s:
            return max(0.0, answering - (time.monotonic() - life.trace.began - life.trace.ttft_s))
        return answering + prefill_seconds(life.prefilled, life.trace.prompt_tokens, self._knowledge.costs().prefill)
