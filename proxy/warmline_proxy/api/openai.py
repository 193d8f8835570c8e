"""OpenAI's chat and completions: the internal form itself.  Values that we don't need stay the bytes that came."""

from collections.abc import Mapping
from typing import Any

import msgspec

from warmline_common.protocol.messages import decode
from warmline_common.protocol.sse import DONE, ChunkFold, data_event
from warmline_proxy.api.base import Begun, Call, Chunk
from warmline_proxy.errors import ClientError
from warmline_proxy.http.body_fields import model_name, object_of, optional, retry_count, session_hint


class OpenAI:
    """An apis.Api."""

    def __init__(self, endpoint: str) -> None:
        self.name = self.endpoint = endpoint

    def read(self, body: bytes, headers: Mapping[str, str]) -> Call:
        """Wrong types of what only the backend needs are for the backend to refuse."""
        fields = object_of(body)
        options = optional(fields, "stream_options", dict) or {}
        return Call(
            api=self,
            fields=fields,
            client_model=model_name(optional(fields, "model", object)),
            stream=optional(fields, "stream", bool) is True,
            include_usage=options.get("include_usage") is True,
            session_hint=session_hint(fields, headers),
            retry_count=retry_count(headers),
        )

    def encoder(self, call: Call, begun: Begun) -> "_Encoder":
        return _Encoder(call)

    def refusal(self, error: ClientError) -> bytes:
        return error.body

    def failure(self, error: ClientError) -> bytes:
        return data_event(error.body)


class _Encoder:
    def __init__(self, call: Call) -> None:
        self._call, self._fold = call, None if call.stream else ChunkFold()

    def chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        if self._fold is not None:
            self._fold.add(decode(raw, dict[str, Any]))
            return b""
        if not self._call.include_usage and _usage_only(chunk):
            return b""
        return data_event(self._rewritten(chunk).replace(b"\n", b"\ndata: "))  # newlines between JSON's tokens, if any

    def done(self) -> bytes:
        return DONE

    def whole(self) -> bytes:
        assert self._fold is not None
        folded = self._fold.result()
        if self._call.client_model is not None:
            folded["model"] = self._call.client_model
        return msgspec.json.encode(folded)

    def failure(self, error: ClientError) -> bytes:
        return data_event(error.body)

    def _rewritten(self, chunk: Chunk) -> bytes:
        """The chunk under the client's model name; all other values are the bytes that came."""
        if self._call.client_model is not None and "model" in chunk:
            chunk["model"] = msgspec.Raw(msgspec.json.encode(self._call.client_model))
        if not self._call.include_usage:
            chunk.pop("usage", None)
        return msgspec.json.encode(chunk)


def _usage_only(chunk: Chunk) -> bool:
    return "usage" in chunk and bytes(chunk.get("choices", b"[]")) == b"[]"
