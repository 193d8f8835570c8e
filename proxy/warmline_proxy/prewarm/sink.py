"""Destination of an answer that is not wanted."""

import math

from warmline_proxy.api.base import ApiCall, Chunk, PromptProgress, ResponseEncoder, ResponseStart
from warmline_proxy.errors import ClientError


class DiscardingSink:
    """ResponseSink and ResponseEncoder that drop the answer, and keep the error."""

    def __init__(self, call: ApiCall) -> None:
        self.call: ApiCall | None = call
        self.has_content = self.is_closed = self.has_started = False
        self.last_write_at = math.inf  # no heartbeats
        self.error: ClientError | None = None

    def open_encoder(self, response_start: ResponseStart) -> ResponseEncoder:
        return self

    def encode_chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        return b""

    def encode_progress(self, progress: PromptProgress, loading: str = "", index: int = 0) -> bytes:
        return b""

    def encode_done(self) -> bytes:
        return b""

    encode_json = encode_done

    def encode_stream_error(self, error: ClientError) -> bytes:
        return b""

    async def write(self, data: bytes) -> None:
        """Drop the data."""

    async def send_heartbeat(self, comment: bytes, progress: PromptProgress, loading: str) -> None:
        """Drop it."""

    async def end(self, data: bytes = b"") -> None:
        self.is_closed = True

    send_json = end

    async def fail(self, error: ClientError) -> None:
        self.error, self.is_closed = error, True

    def close(self) -> None:
        self.is_closed = True
