"""Anthropic's Messages: read into OpenAI's chat body, answered from its chunks."""

from collections.abc import Mapping

from warmline_common.protocol.sse import encode_event
from warmline_proxy.api.anthropic.errors import encode_error_envelope
from warmline_proxy.api.anthropic.ids import parse_session
from warmline_proxy.api.anthropic.request import MessagesBody, build_chat_fields, read_body
from warmline_proxy.api.anthropic.response import MessageEncoder
from warmline_proxy.api.base import ApiCall, ResponseEncoder, ResponseStart
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.body_fields import (
    check_nesting,
    find_session_hint,
    parse_model_name,
    parse_retry_count,
    strip_unprintable,
)


class MessagesApi:
    """An apis.Api."""

    name, endpoint = "messages", "chat"

    def read_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        """Whatever is wrong with a value that only the backend needs is for the backend to refuse."""
        parsed = read_body(body)
        if parsed.max_tokens is None:
            raise bad_request("max_tokens: Field required", param="max_tokens")
        return self._build_call(parsed, headers)

    def read_count_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        """A body of count_tokens: the same without `max_tokens`."""
        return self._build_call(read_body(body), headers)

    def _build_call(self, body: MessagesBody, headers: Mapping[str, str]) -> ApiCall:
        fields = build_chat_fields(body)
        check_nesting(fields)
        return ApiCall(
            api=self,
            fields=fields,
            client_model=parse_model_name(body.model),
            stream=body.stream is True,
            session_hint=find_session_hint(body.others, headers) or strip_unprintable(parse_session(body.user_id)),
            retry_count=parse_retry_count(headers),
            api_options=body.max_tokens,
        )

    def create_encoder(self, call: ApiCall, response_start: ResponseStart) -> ResponseEncoder:
        return MessageEncoder(call, response_start)

    def encode_error(self, error: ClientError) -> bytes:
        return encode_error_envelope(error)

    def encode_stream_error(self, error: ClientError) -> bytes:
        return encode_event(encode_error_envelope(error), "error")
