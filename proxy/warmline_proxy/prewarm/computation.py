"""A prompt computed ahead: rendered, looked up, computed by the pipeline where it is not stored, pinned."""

import asyncio
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from warmline_common.logging import request_context
from warmline_common.protocol.messages import KvLayout, PromptReply
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, unpack_tokens
from warmline_proxy.api.base import ApiCall
from warmline_proxy.auth.principals import Client
from warmline_proxy.errors import decode_error_body
from warmline_proxy.index.index import Index
from warmline_proxy.index.tree import digest_prefix
from warmline_proxy.models.backend import Backend
from warmline_proxy.pipeline.pipeline import Pipeline
from warmline_proxy.planner import align_to_grid, list_restore_cuts
from warmline_proxy.prewarm.calls import PrewarmError, make_tokens_call
from warmline_proxy.prewarm.sink import DiscardingSink
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import RequestLog
from warmline_proxy.retention.pin import PinLimitError, UnknownSessionError, pin_session
from warmline_proxy.store.rows import PinRequest, PrefixMatch, SessionRow
from warmline_proxy.upstream.client import UpstreamError, UpstreamStatusError, translate_upstream_error

ENDPOINT = "prewarm"  # in PERF lines and metrics
CALLER = "prewarm"  # admission is fair between callers


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt to compute ahead, rendered by the backend that serves its model."""

    call: ApiCall  # whose prompt it is
    root: bytes
    tokens: bytes  # packed: of a file's prompt all, of a head's up to its end
    turn_end: int  # as in PromptReply
    is_head: bool  # of other prompts, which go on after it
    layout: KvLayout

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def name(self) -> tuple[bytes, bytes]:
        """Name that no other prompt has."""
        return self.root, digest_prefix(self.tokens, self.token_count)


def find_required_position(prompt: PreparedPrompt) -> int:
    """Position from which a request that begins with this prompt is to start, once that is stored.

    Recurrent layers start from checkpoints alone: at a head's end, or at the end of a file's messages.
    """
    layout = prompt.layout
    end = prompt.turn_end if layout.has_states and prompt.turn_end else prompt.token_count
    return align_to_grid(end - 1, layout.grid) if layout.grid or not (prompt.is_head or layout.has_states) else end


def is_stored(prompt: PreparedPrompt, match: PrefixMatch) -> bool:
    """True where a request that goes on after this prompt can start from its required position."""
    cuts = list_restore_cuts(prompt.token_count + 1, match, prompt.layout)
    return bool(cuts) and cuts[-1].position >= find_required_position(prompt)


def find_pinned_session(prompt: PreparedPrompt, client: str, rows: Collection[SessionRow]) -> SessionRow | None:
    """Session of this prompt that is pinned; None where there is none."""
    return next((row for row in rows if row.pinned and row.client == client and _is_session_of(prompt, row)), None)


def _is_session_of(prompt: PreparedPrompt, row: SessionRow) -> bool:
    end = min(row.turn_end, prompt.token_count)
    return row.root == prompt.root and digest_prefix(prompt.tokens, end) == row.turn_digest


@dataclass(frozen=True, eq=False)
class PromptComputer:
    """Steps of computing a prompt ahead.  Each raises UpstreamError, IndexStoreError, ClientError and PrewarmError."""

    index: Index
    pipeline: Pipeline

    async def prepare(self, backend: Backend, client: Client, call: ApiCall, *, is_head: bool) -> PreparedPrompt:
        """Render a call; of a head's, whose last message is a placeholder, the part up to the head's end."""
        request_id = _make_request_id()
        try:
            reply = await self.pipeline.steps.renderer.render(backend, call, client.tenant, request_id)
        except UpstreamStatusError as error:
            raise PrewarmError(decode_error_body(translate_upstream_error(error)).message) from error
        await backend.state.sync_residents(reply)  # also the status, after a restart
        if (layout := (await backend.state.status()).layout) is None or not layout.persistent:
            why = layout.why_not if layout else ""
            raise PrewarmError("the model's KV can't be stored" + (f": {why}" if why else ""))
        root = namespace(reply.fingerprint, client.tenant)
        if is_head:
            tokens = _cut_head(reply)
            return PreparedPrompt(make_tokens_call(unpack_tokens(tokens)), root, tokens, 0, is_head, layout)
        return PreparedPrompt(call, root, reply.tokens, reply.turn_end, is_head, layout)

    async def check_stored(self, prompt: PreparedPrompt) -> bool:
        match = await asyncio.to_thread(self.index.match_prefix, prompt.root, prompt.tokens, prompt.token_count)
        return is_stored(prompt, match)

    async def compute(
        self,
        backend: Backend,
        client: Client,
        prompt: PreparedPrompt,
        session_name: str,
        on_start: Callable[[Request], None],
    ) -> Request:
        """Compute what is not stored of a prompt, save it under a session of this name, and return the request.

        Cancelled, it leaves what is computed, which is saved in the background.
        """
        sink = DiscardingSink(prompt.call)
        request_log = RequestLog(ENDPOINT, id=_make_request_id(), key=client.name)
        request = Request(request_log, sink, self.pipeline.timeouts, client=client, caller=CALLER)
        request.is_background, request.names_model = True, False
        request.call, request.assigned_backend = prompt.call, backend
        request_log.model, request_log.session_hint = backend.name, session_name
        request.ticket = backend.admission.issue_ticket(CALLER)
        request.is_admitted = True
        self.pipeline.registry.add(request)
        on_start(request)
        with request_context(request_log.id):
            await self.pipeline.compute(request)
        await request.saved.wait()
        if sink.error is not None and sink.error.status >= 500:  # of the backend, which may have ended meanwhile
            raise UpstreamError(decode_error_body(sink.error).message)
        if sink.error is not None:
            raise sink.error
        return request

    async def pin(self, session: str) -> str:
        """Pin a session; returns why it could not be, "" for success."""
        if not session:
            return "not pinned: nothing of it is stored"
        try:
            await asyncio.to_thread(pin_session, self.index, PinRequest(session=session))
        except (PinLimitError, UnknownSessionError) as error:
            return f"not pinned: {error}"
        return ""

    async def unpin(self, is_obsolete: Callable[[SessionRow], bool]) -> None:
        """Unpin sessions, such as those of an earlier fingerprint."""
        for row in await asyncio.to_thread(self.index.sessions):
            if row.pinned and is_obsolete(row):
                await asyncio.to_thread(pin_session, self.index, PinRequest(session=row.id, off=True))

    async def list_sessions(self) -> list[SessionRow]:
        return await asyncio.to_thread(self.index.sessions)


def _cut_head(reply: PromptReply) -> bytes:
    """Tokens up to the end of system messages and tools.  Raises PrewarmError where that is not known."""
    if not (end := next(iter(reply.boundaries), 0)) or end >= (reply.turn_end or len(reply.tokens) // TOKEN_BYTES):
        raise PrewarmError("the chat template does not tell where system messages and tools end: give a file instead")
    return reply.tokens[: end * TOKEN_BYTES]


def _make_request_id() -> str:
    return f"prewarm-{secrets.token_hex(8)}"
