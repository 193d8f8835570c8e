"""OpenAI's chat and completions, the internal form itself, and the list of models.

Values that are not read stay the bytes that came.  Pure.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from warmline_common.protocol.messages import decode
from warmline_common.protocol.sse import DONE, ChunkAggregator, encode_event
from warmline_proxy.api.base import (
    ApiCall,
    Chunk,
    Fields,
    PromptProgress,
    ResponseEncoder,
    ResponseStart,
    is_usage_chunk,
)
from warmline_proxy.api.chat_custom_tools import convert_calls, convert_custom_tools
from warmline_proxy.api.models import ServedModelInfo
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http import body_fields

MODELS_PATH = "/v1/models"
_NULL = msgspec.Raw(b"null")


class OpenAIApi:
    """Api of /v1/chat/completions and /v1/completions."""

    def __init__(self, endpoint: str) -> None:
        self.name = self.endpoint = endpoint

    async def read_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        """Raises ClientError 400; wrong types of fields that only the backend needs are refused by the backend."""
        fields: Fields = dict(body_fields.parse_object(body))
        body_fields.check_message_count(fields.get("messages"), "messages")
        options = body_fields.decode_optional_field(fields, "stream_options", dict) or {}
        return_progress = body_fields.decode_field(fields, "return_progress")
        if not isinstance(return_progress, bool | None):
            raise bad_request("'return_progress' must be true or false.", param="return_progress")
        fields.pop("return_progress", None)  # the backend has no such field
        fields, custom_tools = convert_custom_tools(fields) if self.endpoint == "chat" else (fields, frozenset())
        return ApiCall(
            api=self,
            fields=fields,
            client_model=body_fields.parse_model_name(body_fields.decode_optional_field(fields, "model", object)),
            stream=body_fields.decode_optional_field(fields, "stream", bool) is True,
            include_usage=options.get("include_usage") is True,
            session_hint=body_fields.find_session_hint(fields, headers),
            retry_count=body_fields.parse_retry_count(headers),
            api_options=custom_tools,
            progress_interval_s=0.0 if return_progress else None,
        )

    def create_encoder(
        self, call: ApiCall, response_start: ResponseStart, earlier: ResponseEncoder | None = None
    ) -> "_OpenAIEncoder":
        return _OpenAIEncoder(call, response_start)

    def encode_error(self, error: ClientError) -> bytes:
        return error.body

    def encode_stream_error(self, error: ClientError) -> bytes:
        return encode_event(error.body)


class _OpenAIEncoder:
    def __init__(self, call: ApiCall, response_start: ResponseStart) -> None:
        self._call, self._response_start = call, response_start
        self._aggregator = None if call.stream else ChunkAggregator()
        self._custom_tools: frozenset[str] = call.api_options

    def encode_chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        if self._aggregator is not None:
            self._aggregator.add(decode(raw, dict[str, Any]))
            return b""
        if not self._call.include_usage and is_usage_chunk(chunk):
            return b""
        if self._call.client_model is not None and "model" in chunk:
            chunk["model"] = msgspec.Raw(msgspec.json.encode(self._call.client_model))
        if self._call.include_usage:
            chunk.setdefault("usage", _NULL)
        else:
            chunk.pop("usage", None)
        if self._custom_tools:
            self._convert_calls(chunk)
        encoded = msgspec.json.encode(chunk)  # all other values are the bytes that came, perhaps over several lines
        return encode_event(encoded.replace(b"\n", b"\ndata: "))

    def encode_progress(self, progress: PromptProgress, loading: str = "", index: int = 0) -> bytes:
        """A chunk as llama.cpp's server sends it, with an empty delta."""
        is_chat, start = self._call.api.endpoint == "chat", self._response_start
        content: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        chunk: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{start.request_id}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": start.model if self._call.client_model is None else self._call.client_model,
            "choices": [{"index": index, **content, "logprobs": None, "finish_reason": None}],
            "prompt_progress": progress,
        }
        if self._call.include_usage:
            chunk["usage"] = None
        return encode_event(msgspec.json.encode(chunk | ({"loading": loading} if loading else {})))

    def _convert_calls(self, chunk: Chunk) -> None:
        """Write calls of custom tools in their form; the backend sends each call whole."""
        choices = decode(chunk["choices"], list[dict[str, Any]])
        for choice in choices:
            if calls := (choice.get("delta") or {}).get("tool_calls"):
                choice["delta"]["tool_calls"] = convert_calls(calls, self._custom_tools)
                chunk["choices"] = msgspec.Raw(msgspec.json.encode(choices))

    def encode_done(self) -> bytes:
        return DONE

    def encode_json(self) -> bytes:
        assert self._aggregator is not None
        completion = self._aggregator.result()
        for choice in completion["choices"] if self._custom_tools else ():
            if calls := choice["message"].get("tool_calls"):
                choice["message"]["tool_calls"] = convert_calls(calls, self._custom_tools)
        if self._call.client_model is not None:
            completion["model"] = self._call.client_model
        return msgspec.json.encode(completion)

    def encode_stream_error(self, error: ClientError) -> bytes:
        return encode_event(error.body)


def build_models_reply(name: str, models: Sequence[ServedModelInfo]) -> dict[str, Any]:
    """Entry of the only model given, under `name`; without a name, the list.  Fields as in vLLM."""
    entries = [_build_model_entry(name or model.name, model) for model in models]
    return entries[0] if name else {"object": "list", "data": entries}


def _build_model_entry(name: str, model: ServedModelInfo) -> dict[str, Any]:
    about = {"object": "model", "created": model.created, "owned_by": "warmline", "root": model.name}
    entry: dict[str, Any] = {"id": name, **about}
    if model.context_tokens_max:
        entry["max_model_len"] = model.context_tokens_max
    if model.is_loaded is not None:
        entry["loaded"] = model.is_loaded
    return entry
