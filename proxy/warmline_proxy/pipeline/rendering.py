"""A call's prompt, as the backend renders it: to be answered from, or to be counted."""

from collections import Counter
from dataclasses import replace

from warmline_common.protocol.messages import PromptReply, PromptRequest
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace
from warmline_proxy.api.base import ApiCall
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import parse_context_overflow, translate_upstream_error
from warmline_proxy.explain.stabilize import stabilize_fields
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.request_log import new_request_id
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream, UpstreamStatusError


class RemoteRenderer:
    """Takes no place in the queue and leaves nothing behind.  Event loop thread."""

    def __init__(
        self, config: ProxyConfig, upstream: Upstream, backend_state: BackendState, sampled_turns: SampledTurnCache
    ) -> None:
        self._rules, self._upstream, self._backend_state, self._sampled_turns = (
            config.stabilize_rules,
            upstream,
            backend_state,
            sampled_turns,
        )

    def stabilize(self, call: ApiCall) -> tuple[ApiCall, Counter[str]]:
        """By the rules that somebody asked for, and how often each had to act."""
        if not self._rules:
            return call, Counter()
        fields, counts = stabilize_fields(call.fields, self._rules)
        return replace(call, fields=fields), counts

    async def render(self, call: ApiCall, tenant: str, request_id: str, timeout_s: float | None = None) -> PromptReply:
        """With what is remembered of this tenant's calls.  Raises UpstreamError: Refused for what is wrong with it."""
        status = await self._backend_state.status()
        body = call.build_prompt_body(status.model)
        turns = self._sampled_turns.find(namespace(status.fingerprint, tenant), body.get("messages"))
        request = PromptRequest(request_id=request_id, endpoint=call.api.endpoint, body=body, turns=turns)
        return await self._upstream.render_prompt(request, timeout_s)

    async def count_tokens(self, call: ApiCall, tenant: str) -> int:
        """The tokens of the very prompt that it would be answered from; one that is too long has a length, too.

        Raises UpstreamError.
        """
        call, _ = self.stabilize(call)
        try:
            return len((await self.render(call, tenant, new_request_id())).tokens) // TOKEN_BYTES
        except UpstreamStatusError as error:
            if numbers := parse_context_overflow(translate_upstream_error(error)):
                return numbers[0]
            raise
