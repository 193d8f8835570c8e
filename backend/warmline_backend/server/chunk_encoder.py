"""Encoder of OpenAI's stream chunks as SSE bytes.

    role  ->  reasoning, text and calls  ->  finish  ->  usage  ->  warmline_common.protocol.sse.DONE

Without streaming, a client gets the same chunks folded (`warmline_common.protocol.sse.ChunkAggregator`).
"""

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.generation.sampling import LOGPROB_MIN
from warmline_backend.output.detokenizer import get_token_bytes
from warmline_common.protocol.messages import ErrorBody, ErrorReply, encode
from warmline_common.protocol.sse import encode_event


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's log-probability, with the likeliest alternatives; `raw` is its exact bytes."""

    token: str
    raw: bytes
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()


class TokenDecoder:
    """Decoder of single tokens: text for people, bytes for exactness (a token may be half a character)."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._token_bytes = get_token_bytes(tokenizer)

    def decode_logprob(
        self, token: int, logprob: float, top: Sequence[tuple[int, float]] = (), *, begins_text: bool = False
    ) -> TokenLogprob:
        """Decode a token; its log-probability is at least OpenAI's LOGPROB_MIN, since JSON has no infinity."""
        raw = self._token_bytes.decode(token, begins_text=begins_text)
        others = tuple(self.decode_logprob(other, value, begins_text=begins_text) for other, value in top)
        return TokenLogprob(raw.decode("utf-8", "replace"), raw, max(logprob, LOGPROB_MIN), others)


class ChunkEncoder:
    """Encoder of one answer, called in the answer's order: the older endpoint's log-probabilities carry offsets."""

    def __init__(self, endpoint: str, request_id: str, model: str, created: int) -> None:
        self._is_chat = endpoint == "chat"
        self._common_fields = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._text_offset = 0  # in characters, of the next token's log-probability
        self._utf8_decoder = getincrementaldecoder("utf-8")("replace")

    def encode_role(self) -> bytes:
        """The opening chunk of a chat, before any content; empty for a completion."""
        return self._encode_choice({"role": "assistant", "refusal": None}) if self._is_chat else b""

    def encode_text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """New text, with the log-probabilities of its tokens, without those that an earlier chunk had."""
        return self._encode_choice({"content": text} if self._is_chat else text, logprobs)

    def encode_reasoning(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """New reasoning, under both names that clients look for, and log-probabilities as in DeepSeek's API."""
        choice = {"reasoning_content": text, "reasoning": text}
        return self._encode_choice(choice, logprobs, logprobs_name="reasoning_content")

    def encode_tool_call(self, index: int, call_id: str, name: str, arguments: str) -> bytes:
        """A whole call; `arguments` is JSON, `index` counts an answer's calls from 0."""
        call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return self._encode_choice({"tool_calls": [call]})

    def encode_finish(self, reason: str, stop_reason: str = "", *, empty: bool = False) -> bytes:
        """The finish chunk; `reason` is OpenAI's: "stop", "length" or "tool_calls".

        `stop_reason` is the stop word that was met, or why an answer of a given form was cut.

        `empty`: no content and no call was sent; the content is "" then, while beside calls it is null.
        """
        delta = {"content": ""} if empty else {}
        return self._encode_choice(delta if self._is_chat else "", finish=reason, stop_reason=stop_reason)

    def encode_usage(
        self, prompt_tokens: int, completion_tokens: int, cached_tokens: int, completion_details: Mapping[str, int]
    ) -> bytes:
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": completion_details,
        }
        return encode_event(msgspec.json.encode({**self._common_fields, "choices": [], "usage": usage}))

    def encode_error(self, message: str, kind: str = "server_error", code: str | None = None) -> bytes:
        """The end of a stream that failed after it began; no [DONE] may follow."""
        return encode_event(encode(ErrorReply(error=ErrorBody(message=message, type=kind, code=code))))

    def _encode_choice(
        self,
        content: object,
        logprobs: Sequence[TokenLogprob] = (),
        finish: str | None = None,
        stop_reason: str = "",
        logprobs_name: str = "content",
    ) -> bytes:
        choice = {
            "index": 0,
            "delta" if self._is_chat else "text": content,
            "logprobs": self._format_logprobs(logprobs, logprobs_name) if logprobs else None,
            "finish_reason": finish,
            **({"stop_reason": stop_reason} if stop_reason else {}),
        }
        return encode_event(msgspec.json.encode({**self._common_fields, "choices": [choice]}))

    def _format_logprobs(self, logprobs: Sequence[TokenLogprob], name: str) -> dict[str, Any]:
        if self._is_chat:
            return {"content": None, "refusal": None, name: [_format_with_alternatives(entry) for entry in logprobs]}
        offsets = []
        for entry in logprobs:
            offsets.append(self._text_offset)
            self._text_offset += len(self._utf8_decoder.decode(entry.raw))
        return {
            "tokens": [entry.token for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [{other.token: other.logprob for other in entry.top} for entry in logprobs],
            "text_offset": offsets,
        }


def _format_logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.raw)}


def _format_with_alternatives(entry: TokenLogprob) -> dict[str, Any]:
    return _format_logprob(entry) | {"top_logprobs": list(map(_format_logprob, entry.top))}
