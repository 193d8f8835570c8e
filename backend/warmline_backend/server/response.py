"""A generation's events as the bytes of its answer: server-sent events, or one JSON folded from them."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec

from warmline_backend.generation.events import (
    EndedEvent,
    GenerationEvent,
    HeldEvent,
    PrefillProgress,
    SampledLogprobs,
    StartedEvent,
    TokenEvent,
)
from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.server.chunk_encoder import ChunkEncoder, TokenDecoder, TokenLogprob
from warmline_backend.server.prompt_store import StoredPrompt
from warmline_common.protocol.messages import RESULT_EVENT, SampledTurn, encode
from warmline_common.protocol.sse import DONE, ChunkAggregator, SseParser, encode_comment, encode_event
from warmline_common.protocol.tokens import pack_tokens

INVALID_REQUEST, SERVER_ERROR = "invalid_request_error", "server_error"  # kinds of errors
SUCCESSFUL_FINISHES = ("stop", "length")  # all others are errors to the client
SILENT_TOKENS_PER_COMMENT = 16  # while a tool call is held back until it is complete


class GenerationResponse:
    """The answer's encoder; `finish` and `error` are set at its end."""

    def __init__(
        self, prompt: StoredPrompt, request_id: str, model: str, token_decoder: TokenDecoder, with_usage: bool
    ) -> None:
        self._prompt, self._token_decoder, self._with_usage = prompt, token_decoder, with_usage
        self._encoder = ChunkEncoder(prompt.endpoint, request_id, model, int(time.time()))
        self._pending_logprobs: deque[tuple[int, SampledLogprobs]] = deque()  # by token; their text may still come
        self._is_open = False
        self._silent_tokens = 0  # since the last chunk
        self._sampled_tokens: list[int] = []
        self._reasoning_tokens = 0
        self._stop_word = ""
        self._tool_calls: dict[str, ToolCall] = {}  # by id
        self._has_content = bool(prompt.echo)
        self.finish = ""
        self.error = ""
        self.error_code = ""  # of a request that can't be served; "" for other errors

    async def stream(self, events: "asyncio.Queue[GenerationEvent]", *, closing_event: bool) -> AsyncIterator[bytes]:
        """Yield the bytes of all queued events in one piece."""
        while not self.finish:
            parts = [self._encode_event(await events.get(), closing_event)]
            while not events.empty():
                parts.append(self._encode_event(events.get_nowait(), closing_event))
            if data := b"".join(parts):
                yield data

    async def fold(self, events: "asyncio.Queue[GenerationEvent]") -> object:
        """The folded answer; invalid where there is an `error`."""
        fold, parser = ChunkAggregator(), SseParser()
        async for data in self.stream(events, closing_event=False):
            for event in parser.feed(data):
                if event.data and event.data != b"[DONE]":
                    fold.add(msgspec.json.decode(event.data))
        return fold.result()

    def _encode_event(self, event: GenerationEvent, closing_event: bool) -> bytes:
        match event:
            case StartedEvent():
                return encode_comment("started")
            case PrefillProgress():
                return encode_comment(f"prefill {event.done}/{event.total}")
            case TokenEvent():
                return self._encode_opening() + self._encode_token(event)
            case HeldEvent():
                return self._encode_silence()
            case EndedEvent():
                return self._encode_end(event, closing_event)

    def _encode_opening(self) -> bytes:
        if self._is_open:
            return b""
        self._is_open = True
        echo = self._prompt.echo
        return self._encoder.encode_role() + (self._encoder.encode_text(echo) if echo else b"")

    def _encode_token(self, piece: TokenEvent) -> bytes:
        self._sampled_tokens.append(piece.token)
        self._reasoning_tokens += piece.is_reasoning
        self._stop_word = piece.stop_word
        if piece.logprobs is not None:
            self._pending_logprobs.append((len(self._sampled_tokens) - 1, piece.logprobs))
        return self._encode_parts(piece.parts) if piece.parts else self._encode_silence()

    def _encode_silence(self) -> bytes:
        """A comment from time to time, while tokens come and nothing is sent."""
        self._silent_tokens += 1
        return b"" if self._silent_tokens % SILENT_TOKENS_PER_COMMENT else encode_comment("held")

    def _encode_parts(self, parts: Sequence[Part]) -> bytes:
        self._silent_tokens = 0
        return b"".join([self._encode_part(part) for part in parts])

    def _encode_part(self, part: Part) -> bytes:
        if isinstance(part, Text):
            self._has_content = True
            return self._encoder.encode_text(part.text, self._take_logprobs(part))
        if isinstance(part, Reasoning):
            return self._encoder.encode_reasoning(part.text, self._take_logprobs(part))
        index, call_id = len(self._tool_calls), f"call_{secrets.token_hex(12)}"
        self._tool_calls[call_id] = part
        return self._encoder.encode_tool_call(index, call_id, part.name, part.arguments)

    def _take_logprobs(self, text: Text | Reasoning) -> list[TokenLogprob]:
        """Take the log-probabilities of the text's tokens; those of tokens before them belong to no text."""
        taken = []
        while self._pending_logprobs and self._pending_logprobs[0][0] < text.end:
            index, sampled = self._pending_logprobs.popleft()
            if index >= text.start:
                decode = self._token_decoder.decode_logprob
                taken.append(decode(sampled.token, sampled.logprob, sampled.top, begins_text=index == 0))
        return taken

    def _make_completion_details(self, predicted: int | None) -> dict[str, int]:
        """`completion_tokens_details` of the usage; the prediction's only where one was compared."""
        details, prediction = {"reasoning_tokens": self._reasoning_tokens}, len(self._prompt.prediction)
        if prediction and predicted is not None:
            details["accepted_prediction_tokens"] = predicted
            details["rejected_prediction_tokens"] = max(0, prediction - predicted)
        return details

    def _make_sampled_turn(self) -> SampledTurn | None:
        """The sampled tokens of the calls, for later prompts in which the client sends them back."""
        last = next(reversed(self._tool_calls.values()), None)
        if last is None or last.start < 0:
            return None
        tokens = pack_tokens(self._sampled_tokens[last.start : last.end])
        return SampledTurn(calls=list(self._tool_calls), tokens=tokens)

    def _encode_end(self, ended: EndedEvent, closing_event: bool) -> bytes:
        result, encoder = msgspec.structs.replace(ended.result, turn=self._make_sampled_turn()), self._encoder
        self.finish = result.finish
        closing = encode_event(encode(result), RESULT_EVENT) if closing_event else b""
        if result.finish not in SUCCESSFUL_FINISHES:
            self.error = result.error or f"the request was {result.finish}"
            self.error_code = result.error_code
            kind = INVALID_REQUEST if self.error_code else SERVER_ERROR
            return encoder.encode_error(self.error, kind, self.error_code or result.finish) + closing
        parts = [self._encode_opening(), self._encode_parts(ended.parts)]
        reason = "tool_calls" if self._tool_calls and result.finish == "stop" else result.finish
        stop_reason, is_empty = ended.stop_reason or self._stop_word, not (self._has_content or self._tool_calls)
        parts.append(encoder.encode_finish(reason, stop_reason, empty=is_empty))
        if self._with_usage:
            prompt_tokens, decoded = len(self._prompt.tokens), result.timings.decoded
            details = self._make_completion_details(result.timings.predicted)
            parts.append(encoder.encode_usage(prompt_tokens, decoded, ended.reused_tokens, details))
        return b"".join(parts) + DONE + closing
