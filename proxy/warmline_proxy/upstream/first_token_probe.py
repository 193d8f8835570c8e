"""Computing a prompt's first token again: cold, or from what is on disk; in the background, and nothing is kept of it.

What the backend can't do, or gives up because others want its memory, is None: nothing is known then.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from warmline_common.protocol.messages import SETTLED_EVENT, FirstLogits, PromptRequest, RestoreRequest, Settled, decode
from warmline_common.protocol.sse import EventParser
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, unpack_tokens
from warmline_proxy.index.index import Index
from warmline_proxy.planner import COLD, Plan
from warmline_proxy.upstream.client import ByteStream, Garbled, Upstream
from warmline_proxy.upstream.resident_view import Mirror

ANSWERED = ("stop", "length")


class OtherModel(Exception):
    """What the backend serves now is not what the tokens were computed with."""


class Recomputer:
    """Every method raises UpstreamError where the backend fails, and OtherModel."""

    def __init__(self, upstream: Upstream, index: Index, mirror: Mirror, tenants: Callable[[], Iterable[str]]) -> None:
        """`tenants`: all that there are, to tell whose a root is."""
        self._upstream, self._index, self._mirror, self._tenants = upstream, index, mirror, tenants

    async def cold(self, root: bytes, tokens: bytes, *, cut: int = 0) -> FirstLogits | None:
        """Of a prompt's packed tokens under its namespace `root`; one chunk ends at `cut`, which rounds otherwise."""
        plan = Plan(source=COLD, reuse=0, why_not_warmer="", checkpoints=(cut,) if cut else ())
        return await self._first(root, tokens, plan, _new_id())

    async def restored(self, root: bytes, tokens: bytes, plan: Plan) -> FirstLogits | None:
        """As `cold`, from the plan's chain.  Raises RestoreFailed where a file is at fault."""
        request_id = _new_id()
        request = RestoreRequest(
            request_id=request_id,
            tokens=tokens[: plan.reuse * TOKEN_BYTES],
            chain=list(plan.chain),
            checkpoint=plan.checkpoint,
            root=root,
        )
        self._index.lease(plan.files)
        try:
            resident = (await self._upstream.restore(request)).resident
        finally:
            self._index.release(plan.files)
        self._mirror.shun(resident)  # nobody else's: it may be what is wrong
        try:
            return await self._first(root, tokens, replace(plan, resident=resident), request_id)
        finally:
            await self._upstream.drop_resident(resident)  # where the request did not get to taking it over

    async def _first(self, root: bytes, tokens: bytes, plan: Plan, request_id: str) -> FirstLogits | None:
        body = {"prompt": unpack_tokens(tokens), "max_tokens": 1}
        prompt = await self._upstream.prompt(PromptRequest(request_id=request_id, endpoint="completion", body=body))
        if root not in {namespace(prompt.fingerprint, tenant) for tenant in self._tenants()}:
            raise OtherModel("the backend serves another model, or serves it otherwise; or the client's key is gone")
        stream = await self._upstream.generate(
            "completion", request_id, prompt.prompt_id, plan, root=root, background=True
        )
        settled = await _settled(stream)
        return settled.first if settled and settled.finish in ANSWERED else None


def _new_id() -> str:
    return f"audit-{secrets.token_hex(8)}"


async def _settled(stream: ByteStream) -> Settled | None:
    """How a generation ended; who leaves before has it ended."""
    parser, settled = EventParser(), None
    try:
        async for data in stream.chunks():
            for event in parser.feed(data):
                if event.name == SETTLED_EVENT.encode():
                    settled = decode(event.data, Settled)
    except msgspec.DecodeError as error:
        raise Garbled(f"the end of an audit is not readable: {error}") from error
    finally:
        await stream.close()
    return settled
