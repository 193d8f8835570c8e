"""Interface of an API: a reader of bodies and an encoder of responses.  No I/O but lookups; event loop thread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from warmline_proxy.api.tool_fields import ToolFields
from warmline_proxy.errors import ClientError

Fields = dict[str, Any]  # JSON values; those not looked into stay msgspec.Raw, byte for byte
Chunk = dict[str, msgspec.Raw]

# Chat parameters that other APIs have under the same names, and ours.  The backend refuses invalid values.
PASSTHROUGH_FIELDS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "repetition_context_size"}
    | {"presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos", "chat_template_kwargs", "cache_prompt"}
    | {"min_tokens", "stop_token_ids", "allowed_token_ids"}
)


PROGRESS_INTERVAL_S = 5.0  # `ApiCall.progress_interval_s` of APIs whose clients all get such events


class PromptProgress(msgspec.Struct, frozen=True):
    """Progress of a prompt's prefill, with the names of llama.cpp's server."""

    total: int  # tokens of the prompt; 0 until it is rendered
    cache: int = 0  # of these, reused
    processed: int = 0  # reused or computed
    time_ms: int = 0  # since the prefill began; of a prompt whose model is being loaded, since it waits for that


@dataclass(frozen=True)
class ApiCall:
    """A call for generation, as read from the client's body."""

    api: "Api"
    fields: Fields  # in the internal form, OpenAI's body of the api's `endpoint`, without nulls
    client_model: str | None  # as sent; None where absent
    stream: bool
    session_hint: str  # the client's name of the conversation; unauthenticated
    retry_count: int = 0  # the client's count of this request's tries
    include_usage: bool = False  # in a stream of OpenAI's
    api_options: Any = None  # the api's own, for its encoder
    tool_fields: ToolFields | None = None  # where the tools came; None: as chat has them
    progress_interval_s: float | None = None  # least time between events of the prompt's progress; None: none are sent

    @property
    def can_reuse(self) -> bool:
        """False where llama.cpp's `cache_prompt` asks for a cold start."""
        value = self.fields.get("cache_prompt")
        return bytes(value) != b"false" if isinstance(value, msgspec.Raw) else value is not False


def is_usage_chunk(chunk: Chunk) -> bool:
    """True for a chunk that has usage and no choices."""
    return "usage" in chunk and bytes(chunk.get("choices", b"[]")) == b"[]"


@dataclass(frozen=True)
class ResponseStart:
    """Facts of a response known before its first chunk."""

    request_id: str
    model: str  # the served model's name
    prompt_tokens: int
    cached_tokens: int  # of these, planned to be reused
    on_result: Callable[[Any], bool] = lambda result: True  # stores the response of an API that does; False: it was not


class ResponseEncoder(Protocol):
    """Encoder of one response.  Gets each chunk of the backend's stream once, in order, for a stream as for a JSON
    response; both must have the same content.
    """

    def encode_chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        """Server-sent events for a chunk; b"" for none.  `raw`: the chunk as it came."""

    def encode_progress(self, progress: PromptProgress, loading: str = "", index: int = 0) -> bytes:
        """Event of a stream that is no content.  `loading`: the model that is being loaded; `index`: of the choice."""

    def encode_done(self) -> bytes:
        """End of a complete stream."""

    def encode_json(self) -> bytes:
        """JSON response, after the last chunk."""

    def encode_stream_error(self, error: ClientError) -> bytes:
        """Events that end a failed stream whose response has begun."""


class Api(Protocol):
    """One API, without state."""

    name: str  # in records and PERF lines
    endpoint: str  # of the internal form: "chat" or "completion"

    async def read_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        """Raises ClientError, which `encode_error` puts into this API's form."""

    def create_encoder(
        self, call: ApiCall, response_start: ResponseStart, earlier: ResponseEncoder | None = None
    ) -> ResponseEncoder:
        """`earlier`: the response's encoder so far, of which nothing but progress was sent."""

    def encode_error(self, error: ClientError) -> bytes:
        """JSON body of an error."""

    def encode_stream_error(self, error: ClientError) -> bytes:
        """Events that end a stream that failed after its headers, but before its response began."""
