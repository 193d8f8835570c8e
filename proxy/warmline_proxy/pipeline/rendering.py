"""Step 3: rendering of a call into its prompt's token ids, by the backend.  Event loop thread."""

from collections import Counter
from dataclasses import dataclass, replace

from warmline_common.protocol.messages import PromptReply, PromptRequest
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace
from warmline_proxy.api.base import ApiCall
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import parse_context_overflow, service_unavailable
from warmline_proxy.explain.prompt_head import TOOL_ORDER, stabilize_fields
from warmline_proxy.models.backend import Backend
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.request.request import Request, RequestStatus
from warmline_proxy.request_log import new_request_id
from warmline_proxy.upstream.client import UpstreamStatusError, translate_upstream_error


@dataclass(eq=False)
class RemoteRenderer:
    """Renders without a ticket; the backend keeps nothing of a prompt that is only counted."""

    config: ProxyConfig
    sampled_turns: SampledTurnCache

    def stabilize(self, call: ApiCall) -> tuple[ApiCall, Counter[str]]:
        """The call with the configured rules applied, and how often each rule changed it."""
        if not self.config.stabilize_rules:
            return call, Counter()
        fields, counts = stabilize_fields(call.fields, self.config.stabilize_rules)
        tool_fields = call.tool_fields
        if TOOL_ORDER in counts and tool_fields:
            tool_fields = tool_fields.reorder(call.fields["tools"], fields["tools"])
        return replace(call, fields=fields, tool_fields=tool_fields), counts

    async def render_request(self, request: Request) -> None:
        """Render into the request, with model, layout and root.  Raises UpstreamError; ClientError 503."""
        assert request.call is not None
        request.prompt = await self.render_call(request, request.call)
        request.advance(RequestStatus.WAITING)
        state = request.backend.state
        await state.sync_residents(request.prompt)
        status = await state.status()
        request.model = request.log.model = status.model
        request.layout = status.layout
        if self.config.reuse == "exact" and status.layout and not status.layout.grid:
            message = "The proxy runs with reuse = exact and its backend does not: start both with the same."
            raise service_unavailable(message, "mode_mismatch")
        request.root = request.log.root = namespace(request.prompt.fingerprint, request.client.tenant)
        request.log.prompt_tokens = request.prompt_shape().tokens

    async def render_call(self, request: Request, call: ApiCall) -> PromptReply:
        """Render a call of this request, which may be one of several.  Raises UpstreamError."""
        timeout_s = request.timeouts.stall_s or None
        return await self.render(request.backend, call, request.client.tenant, request.log.id, timeout_s)

    async def count_tokens(self, backend: Backend, call: ApiCall, tenant: str) -> int:
        """Length of the prompt in tokens, also where it is too long to be answered.

        Raises UpstreamError; UpstreamStatusError for a prompt of many times the context, whose length is not computed.
        """
        call, _ = self.stabilize(call)
        try:
            return len((await self.render(backend, call, tenant, new_request_id())).tokens) // TOKEN_BYTES
        except UpstreamStatusError as error:
            overflow = parse_context_overflow(translate_upstream_error(error))
            if overflow is None or not overflow.is_exact:
                raise
            return overflow.prompt_tokens

    async def render(
        self, backend: Backend, call: ApiCall, tenant: str, request_id: str, timeout_s: float | None = None
    ) -> PromptReply:
        """Render for no request, with the tenant's sampled turns.  Raises UpstreamStatusError for an invalid body."""
        status = await backend.state.status()
        body = {**call.fields, "model": status.model}
        root = namespace(status.fingerprint, tenant)
        turns = self.sampled_turns.find(root, body.get("messages"))
        endpoint = call.api.endpoint
        prompt_request = PromptRequest(request_id=request_id, endpoint=endpoint, body=body, turns=turns, root=root)
        try:
            return await backend.upstream.render_prompt(prompt_request, timeout_s)
        except UpstreamStatusError as error:
            if call.tool_fields is not None:
                error.body = call.tool_fields.replace_names(error.body)
            raise
