"""Anthropic's Messages: read into OpenAI's chat body, answered from its chunks."""

from collections.abc import Mapping

from warmline_common.protocol.sse import data_event
from warmline_proxy.api.anthropic.errors import error_object
from warmline_proxy.api.anthropic.ids import session_of
from warmline_proxy.api.anthropic.request import Body, chat_fields, read_body
from warmline_proxy.api.anthropic.response import MessageEncoder
from warmline_proxy.api.base import Begun, Call, Encoder
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.body_fields import check_nesting, model_name, printable, retry_count, session_hint


class Messages:
    """An apis.Api."""

    name, endpoint = "messages", "chat"

    def read(self, body: bytes, headers: Mapping[str, str]) -> Call:
        """Whatever is wrong with a value that only the backend needs is for the backend to refuse."""
        parsed = read_body(body)
        if parsed.max_tokens is None:
            raise bad_request("max_tokens: Field required", param="max_tokens")
        return self._call(parsed, headers)

    def read_to_count(self, body: bytes, headers: Mapping[str, str]) -> Call:
        """A body of count_tokens: the same without `max_tokens`."""
        return self._call(read_body(body), headers)

    def _call(self, body: Body, headers: Mapping[str, str]) -> Call:
        fields = chat_fields(body)
        check_nesting(fields)
        return Call(
            api=self,
            fields=fields,
            client_model=model_name(body.model),
            stream=body.stream is True,
            session_hint=session_hint(body.others, headers) or printable(session_of(body.user_id)),
            retry_count=retry_count(headers),
            asked=body.max_tokens,
        )

    def encoder(self, call: Call, begun: Begun) -> Encoder:
        return MessageEncoder(call, begun)

    def refusal(self, error: ClientError) -> bytes:
        return error_object(error)

    def failure(self, error: ClientError) -> bytes:
        return data_event(error_object(error), "error")
