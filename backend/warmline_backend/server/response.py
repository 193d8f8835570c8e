"""One generation's events as the bytes of its answer: a stream of server-sent events, or one JSON folded from it."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import msgspec

from warmline_backend.generation.events import EndedEvent, GenerationEvent, PrefillProgress, StartedEvent, TokenEvent
from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.server.chunk_encoder import ChunkEncoder, TokenDecoder, TokenLogprob
from warmline_backend.server.prompt_store import StoredPrompt
from warmline_common.protocol.messages import RESULT_EVENT, SampledTurn, encode
from warmline_common.protocol.sse import DONE, ChunkAggregator, SseParser, encode_comment, encode_event
from warmline_common.protocol.tokens import pack_tokens

SUCCESSFUL_FINISHES = ("stop", "length")  # every other finish is an error to whoever asked
SILENT_TOKENS_PER_COMMENT = 16  # a call is told once it is whole; until then, so often, that the engine moves


class GenerationResponse:
    """`finish` and `error` say how it ended once it has."""

    def __init__(
        self, prompt: StoredPrompt, request_id: str, model: str, token_decoder: TokenDecoder, with_usage: bool
    ) -> None:
        self._prompt, self._token_decoder, self._with_usage = prompt, token_decoder, with_usage
        self._encoder = ChunkEncoder(prompt.endpoint, request_id, model, int(time.time()))
        self._pending_logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
        self._is_open = False
        self._silent_tokens = 0  # tokens since the last that was told of
        self._sampled_tokens: list[int] = []
        self._reasoning_tokens = 0  # tokens
        self._stop_word = ""
        self._tool_calls: dict[str, ToolCall] = {}  # by id, as told
        self._has_content = bool(prompt.echo)  # there is content
        self.finish = ""
        self.error = ""

    async def stream(self, events: "asyncio.Queue[GenerationEvent]", *, closing_event: bool) -> AsyncIterator[bytes]:
        """What is there at once goes out at once, in one piece."""
        while not self.finish:
            parts = [self._encode_event(await events.get(), closing_event)]
            while not events.empty():
                parts.append(self._encode_event(events.get_nowait(), closing_event))
            if data := b"".join(parts):
                yield data

    async def fold(self, events: "asyncio.Queue[GenerationEvent]") -> object:
        """The folded answer; of no use where there is an `error`."""
        fold, parser = ChunkAggregator(), SseParser()
        async for data in self.stream(events, closing_event=False):
            for event in parser.feed(data):
                if event.data and event.data != b"[DONE]":
                    fold.add(msgspec.json.decode(event.data))
        return fold.result()

    def _encode_event(self, event: GenerationEvent, closing_event: bool) -> bytes:
        if isinstance(event, StartedEvent):
            return encode_comment("started")
        if isinstance(event, PrefillProgress):
            return encode_comment(f"prefill {event.done}/{event.total}")
        if isinstance(event, TokenEvent):
            return self._encode_opening() + self._encode_token(event)
        return self._encode_end(event, closing_event)

    def _encode_opening(self) -> bytes:
        if self._is_open:
            return b""
        self._is_open = True
        return self._encoder.encode_role() + (
            self._encoder.encode_text(self._prompt.echo) if self._prompt.echo else b""
        )

    def _encode_token(self, piece: TokenEvent) -> bytes:
        self._sampled_tokens.append(piece.token)
        self._reasoning_tokens += piece.is_reasoning
        self._stop_word = piece.stop_word
        if piece.logprobs is not None:
            detail = piece.logprobs
            self._pending_logprobs.append(self._token_decoder.decode_logprob(detail.token, detail.logprob, detail.top))
        if not piece.parts:
            self._silent_tokens += 1
            return b"" if self._silent_tokens % SILENT_TOKENS_PER_COMMENT else encode_comment("held")
        self._silent_tokens = 0
        return b"".join([self._encode_part(part) for part in piece.parts])

    def _encode_part(self, part: Part) -> bytes:
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        if isinstance(part, Text):
            self._has_content = True
            return self._encoder.encode_text(part.text, logprobs)
        if isinstance(part, Reasoning):
            return self._encoder.encode_reasoning(part.text, logprobs)
        index, call_id = len(self._tool_calls), f"call_{secrets.token_hex(12)}"
        self._tool_calls[call_id] = part
        return self._encoder.encode_tool_call(index, call_id, part.name, part.arguments, logprobs)

    def _make_sampled_turn(self) -> SampledTurn | None:
        """What is to stand in later prompts where the client sends these calls back."""
        if not self._tool_calls:
            return None
        last = list(self._tool_calls.values())[-1]
        if last.start < 0:
            return None
        return SampledTurn(
            calls=list(self._tool_calls), tokens=pack_tokens(self._sampled_tokens[last.start : last.end])
        )

    def _encode_end(self, ended: EndedEvent, closing_event: bool) -> bytes:
        settled = msgspec.structs.replace(ended.result, turn=self._make_sampled_turn())
        self.finish = settled.finish
        closing = encode_event(encode(settled), RESULT_EVENT) if closing_event else b""
        if settled.finish not in SUCCESSFUL_FINISHES:
            self.error = settled.error or f"the request was {settled.finish}"
            return self._encoder.encode_error(self.error, code=settled.finish) + closing
        parts = [self._encode_opening()]
        if self._pending_logprobs:
            parts.append(self._encoder.encode_logprobs(self._pending_logprobs))
        reason = "tool_calls" if self._tool_calls and settled.finish == "stop" else settled.finish
        parts.append(
            self._encoder.encode_finish(reason, self._stop_word, empty=not (self._has_content or self._tool_calls))
        )
        if self._with_usage:
            decoded = settled.timings.decoded
            parts.append(
                self._encoder.encode_usage(
                    len(self._prompt.tokens), decoded, ended.reused_tokens, self._reasoning_tokens
                )
            )
        return b"".join(parts) + DONE + closing
