"""A call's prompt, as the backend renders it: to be answered from, or to be counted."""

from collections import Counter
from dataclasses import replace

from warmline_common.protocol.messages import PromptReply, PromptRequest
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace
from warmline_proxy.api.base import Call
from warmline_proxy.config import Config
from warmline_proxy.errors import from_upstream, overflow
from warmline_proxy.explain.stabilize import stabilized
from warmline_proxy.pipeline.sampled_turns import Turns
from warmline_proxy.request_log import new_request_id
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Refused, Upstream


class Renderer:
    """Takes no place in the queue and leaves nothing behind.  Event loop thread."""

    def __init__(self, config: Config, upstream: Upstream, knowledge: Knowledge, turns: Turns) -> None:
        self._rules, self._upstream, self._knowledge, self._turns = config.stabilize_rules, upstream, knowledge, turns

    def stabilize(self, call: Call) -> tuple[Call, Counter[str]]:
        """By the rules that somebody asked for, and how often each had to act."""
        if not self._rules:
            return call, Counter()
        fields, counts = stabilized(call.fields, self._rules)
        return replace(call, fields=fields), counts

    async def render(self, call: Call, tenant: str, request_id: str, timeout_s: float | None = None) -> PromptReply:
        """With what is remembered of this tenant's calls.  Raises UpstreamError: Refused for what is wrong with it."""
        status = await self._knowledge.status()
        body = call.prompt_body(status.model)
        turns = self._turns.recall(namespace(status.fingerprint, tenant), body.get("messages"))
        request = PromptRequest(request_id=request_id, endpoint=call.api.endpoint, body=body, turns=turns)
        return await self._upstream.prompt(request, timeout_s)

    async def count(self, call: Call, tenant: str) -> int:
        """The tokens of the very prompt that it would be answered from; one that is too long has a length, too.

        Raises UpstreamError.
        """
        call, _ = self.stabilize(call)
        try:
            return len((await self.render(call, tenant, new_request_id())).tokens) // TOKEN_BYTES
        except Refused as error:
            if numbers := overflow(from_upstream(error)):
                return numbers[0]
            raise
