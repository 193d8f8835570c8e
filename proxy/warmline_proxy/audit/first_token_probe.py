"""First token of a prompt computed again, cold or from stored segments: in the background, and nothing of it is kept.

Results are None where the backend gave the run up because other requests need its memory.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from warmline_common.protocol import messages
from warmline_common.protocol.messages import FirstLogits, GenerationResult
from warmline_common.protocol.sse import SseParser
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, unpack_tokens
from warmline_proxy.index.index import Index
from warmline_proxy.planner import COLD, RequestPlan
from warmline_proxy.upstream.client import ByteStream, InvalidReplyError, Upstream, UpstreamError
from warmline_proxy.upstream.resident_view import ResidentView

ANSWER_FINISHES = ("stop", "length")
CANCEL_TIMEOUT_S = 10.0


class ModelChangedError(Exception):
    """The backend serves another model than the tokens were computed with."""


@dataclass(frozen=True)
class FirstTokenProbe:
    """Background generations of one token.  Methods raise UpstreamError and ModelChangedError; event loop thread."""

    upstream: Upstream
    index: Index
    resident_view: ResidentView
    tenants: Callable[[], Iterable[str]]  # all known ones, to derive the namespaces of the served model

    async def compute_cold(self, root: bytes, tokens: bytes, *, chunk_end: int = 0) -> FirstLogits | None:
        """Prefill packed tokens under the namespace `root`; a `chunk_end` within them makes the run round otherwise."""
        positions = (chunk_end,) if chunk_end else ()
        plan = RequestPlan(source=COLD, reuse=0, why_not_warmer="", checkpoint_positions=positions)
        return await self._compute(root, tokens, plan, _new_request_id())

    async def compute_restored(self, root: bytes, tokens: bytes, plan: RequestPlan) -> FirstLogits | None:
        """Restore the plan's chain and compute the rest.  Raises RestoreFailedError, which names the file at fault."""
        request_id = _new_request_id()
        request = messages.RestoreRequest(
            request_id=request_id,
            tokens=tokens[: plan.reuse * TOKEN_BYTES],
            chain=list(plan.chain),
            checkpoint=plan.checkpoint,
            root=root,
            prompt_tokens=len(tokens) // TOKEN_BYTES,
        )
        self.index.lease(plan.file_ids)
        try:
            resident = await self._restore(request)
        finally:
            self.index.release(plan.file_ids)
        try:
            return await self._compute(root, tokens, replace(plan, resident=resident), request_id)
        finally:
            await self.upstream.delete_resident(resident)  # still there if the generation did not take it over

    async def _restore(self, request: messages.RestoreRequest) -> str:
        """Restore a resident that no request may start from, since it may be the damaged one; return its id.

        Cancelled, it leaves none.
        """
        restoring = asyncio.ensure_future(self.upstream.restore(request))
        try:
            resident = (await asyncio.shield(restoring)).resident
        except asyncio.CancelledError:
            await self._cancel_restore(request.request_id, restoring)
            raise
        self.resident_view.exclude(resident)
        return resident

    async def _cancel_restore(self, request_id: str, restoring: "asyncio.Future[messages.RestoreReply]") -> None:
        with suppress(UpstreamError):
            await self.upstream.cancel(request_id, CANCEL_TIMEOUT_S)
        with suppress(UpstreamError):
            resident = (await restoring).resident  # it was complete before the cancel
            self.resident_view.exclude(resident)
            await self.upstream.delete_resident(resident)

    async def _compute(self, root: bytes, tokens: bytes, plan: RequestPlan, request_id: str) -> FirstLogits | None:
        body = {"prompt": unpack_tokens(tokens), "max_tokens": 1}
        request = messages.PromptRequest(request_id=request_id, endpoint="completion", body=body)
        prompt = await self.upstream.render_prompt(request)
        if root not in {namespace(prompt.fingerprint, tenant) for tenant in self.tenants()}:
            message = "the backend serves another model, or serves it otherwise; or the client's key is gone"
            raise ModelChangedError(message)
        stream = await self.upstream.generate(
            "completion", request_id, prompt.prompt_id, plan, root=root, background=messages.BACKGROUND_DROP
        )
        result = await _read_result(stream)
        return result.first if result and result.finish in ANSWER_FINISHES else None


def _new_request_id() -> str:
    return f"audit-{secrets.token_hex(8)}"


async def _read_result(stream: ByteStream) -> GenerationResult | None:
    """Read a generation to its end; cancelled before that, close the stream, which cancels the generation."""
    parser, result = SseParser(), None
    try:
        async for data in stream.chunks():
            for event in parser.feed(data):
                if event.name == messages.RESULT_EVENT.encode():
                    result = messages.decode(event.data, GenerationResult)
    except msgspec.DecodeError as error:
        raise InvalidReplyError(f"the end of an audit is not readable: {error}") from error
    finally:
        await stream.close()
    return result
