"""Encoder of OpenAI's stream chunks as SSE bytes.

    role  ->  reasoning, text and calls  ->  finish  ->  usage  ->  warmline_common.protocol.sse.DONE

Without streaming, a client gets the same chunks folded (`warmline_common.protocol.sse.ChunkAggregator`).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

from warmline_backend.generation.sampling import LOGPROB_MIN
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
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet() if isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer) else {}

    def decode_logprob(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
        """Decode a token; its log-probability is at least OpenAI's LOGPROB_MIN, since JSON has no infinity."""
        raw = self._decode_bytes(token)
        others = tuple(self.decode_logprob(other, value) for other, value in top)
        return TokenLogprob(raw.decode("utf-8", "replace"), raw, max(logprob, LOGPROB_MIN), others)

    def _decode_bytes(self, token: int) -> bytes:
        text = str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if "\ufffd" not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if self._byte_of.keys() >= set(piece):
            return bytes(self._byte_of[char] for char in piece)
        if piece.startswith("<0x") and len(piece) == 6:  # byte fallback of SentencePiece vocabularies
            return bytes.fromhex(piece[3:5])
        return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 stands for itself, the rest is moved to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


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
        self._text_offset = 0

    def encode_role(self) -> bytes:
        """The opening chunk of a chat, before any content; empty for a completion."""
        return self._encode_choice({"role": "assistant"}) if self._is_chat else b""

    def encode_text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """New text, with the log-probabilities of the tokens since the last chunk."""
        return self._encode_choice({"content": text} if self._is_chat else text, logprobs)

    def encode_reasoning(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """New reasoning, under both names that clients look for."""
        return self._encode_choice({"reasoning_content": text, "reasoning": text}, logprobs)

    def encode_tool_call(
        self, index: int, call_id: str, name: str, arguments: str, logprobs: Sequence[TokenLogprob] = ()
    ) -> bytes:
        """A whole call; `arguments` is JSON, `index` counts an answer's calls from 0."""
        call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return self._encode_choice({"tool_calls": [call]}, logprobs)

    def encode_logprobs(self, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Log-probabilities of last tokens that have no text."""
        return self._encode_choice({} if self._is_chat else "", logprobs)

    def encode_finish(self, reason: str, stop_word: str = "", *, empty: bool = False) -> bytes:
        """The finish chunk; `reason` is OpenAI's: "stop", "length" or "tool_calls", `stop_word` the one that was met.

        `empty`: no content and no call was sent; the content is "" then, while beside calls it is null.
        """
        delta = {"content": ""} if empty else {}
        return self._encode_choice(delta if self._is_chat else "", finish=reason, stop_word=stop_word)

    def encode_usage(
        self, prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0
    ) -> bytes:
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }
        return encode_event(msgspec.json.encode({**self._common_fields, "choices": [], "usage": usage}))

    def encode_error(self, message: str, kind: str = "server_error", code: str | None = None) -> bytes:
        """The end of a stream that failed after it began; no [DONE] may follow."""
        return encode_event(encode(ErrorReply(error=ErrorBody(message=message, type=kind, code=code))))

    def _encode_choice(
        self, content: object, logprobs: Sequence[TokenLogprob] = (), finish: str | None = None, stop_word: str = ""
    ) -> bytes:
        choice = {
            "index": 0,
            "delta" if self._is_chat else "text": content,
            "logprobs": self._format_logprobs(logprobs) if logprobs else None,
            "finish_reason": finish,
            **({"stop_reason": stop_word} if stop_word else {}),
        }
        return encode_event(msgspec.json.encode({**self._common_fields, "choices": [choice]}))

    def _format_logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": [_format_with_alternatives(entry) for entry in logprobs]}
        offsets = list(accumulate((len(entry.token) for entry in logprobs), initial=self._text_offset))
        self._text_offset = offsets.pop()
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
