"""What an API is to the rest of the proxy: a reader of bodies and a writer of answers.  No I/O; event loop thread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from warmline_proxy.errors import ClientError

Fields = dict[str, Any]  # JSON values; what we don't look into stays msgspec.Raw, the bytes that came
Chunk = dict[str, msgspec.Raw]

# Chat's parameters that APIs with a body of their own have under the same names, and ours beyond theirs.  What is wrong
# with them is the backend's to say.
PASSTHROUGH_FIELDS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "repetition_context_size"}
    | {"presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos", "chat_template_kwargs", "cache_prompt"}
    | {"min_tokens", "stop_token_ids", "allowed_token_ids"}
)


@dataclass(frozen=True)
class ApiCall:
    """One generation as the client asked for it."""

    api: "Api"
    fields: Fields  # in the internal form, OpenAI's body of the api's `endpoint`, without nulls
    client_model: str | None  # as sent; None where absent
    stream: bool
    session_hint: str  # what the client calls the conversation; never proof of anything
    retry_count: int = 0  # the client's own count of this request's tries
    include_usage: bool = False  # in a stream of OpenAI's
    api_options: Any = None  # what the api itself wants to remember of the body, for its answer

    @property
    def can_reuse(self) -> bool:
        """False where the client wants it computed cold, by llama.cpp's `cache_prompt`."""
        value = self.fields.get("cache_prompt")
        return bytes(value) != b"false" if isinstance(value, msgspec.Raw) else value is not False

    def build_prompt_body(self, served_model: str) -> Fields:
        """For POST /kv/prompts, where what is wrong with it is found."""
        return {**self.fields, "model": served_model}


@dataclass(frozen=True)
class ResponseStart:
    """What is known of an answer before its first chunk."""

    request_id: str
    model: str  # the served model's name
    prompt_tokens: int
    cached_tokens: int  # of these, planned to be reused


class ResponseEncoder(Protocol):
    """One answer on its way to its client.  Gets each chunk of the backend's stream once, in order, whether its client
    wants a stream or one JSON; both must say the same.
    """

    def encode_chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        """What a stream says now, as server-sent events; b"" for nothing.  `raw` is the event as it came."""

    def encode_done(self) -> bytes:
        """The clean end of a stream."""

    def encode_json(self) -> bytes:
        """The answer as one JSON, once all chunks are in."""

    def encode_stream_error(self, error: ClientError) -> bytes:
        """As the api's, for a stream in which this answer has begun."""


class Api(Protocol):
    """One API.  Has no state of its own."""

    name: str  # in records and PERF lines
    endpoint: str  # of the internal form: "chat" or "completion"

    def read_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        """Raises ClientError 400, in any API's words: `refusal` puts it into this one's."""

    def create_encoder(self, call: ApiCall, response_start: ResponseStart) -> ResponseEncoder: ...

    def encode_error(self, error: ClientError) -> bytes:
        """An error's JSON body."""

    def encode_stream_error(self, error: ClientError) -> bytes:
        """The server-sent events that end a stream that failed after its headers, but before its answer began."""
