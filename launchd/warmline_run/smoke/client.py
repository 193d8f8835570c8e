"""Client of the examined server, by OpenAI's API alone.  One event loop; every wait is bounded."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from warmline_common.protocol.sse import SseEvent, SseParser
from warmline_run.address import CHAT_PATH
from warmline_run.smoke import responses
from warmline_run.smoke.responses import ChatCompletion, MalformedAnswerError, Message, StreamFold

BAD_REQUEST = 400  # of a server that refuses an unsupported request
EVENT_BYTES_MAX = 64 << 20
# A reasoning model would spend a check's tokens on thoughts.  Servers without this switch ignore it.
NO_REASONING = {"chat_template_kwargs": {"enable_thinking": False}}


class NoAnswerError(Exception):
    """No answer, or none of OpenAI's form: a line for people.  `status` is 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerUnreachableError(NoAnswerError):
    """No server takes connections there."""


class SmokeClient:
    """`url` ends in /v1.  An async context manager, which owns the connections."""

    def __init__(self, url: str, key: str = "", timeout_s: float = 600.0, model: str = "") -> None:
        self.url, self.timeout_s, self.model = url.rstrip("/"), timeout_s, model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "SmokeClient":
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.timeout_s), connector=aiohttp.TCPConnector(force_close=True)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, path: str, secret: str = "") -> tuple[int, Any]:
        """Status and JSON (None for another body) of a path under /v1, or, if it begins with "//", beside it."""
        url = self.url.removesuffix("/v1") + path[1:] if path.startswith("//") else self.url + path
        headers = {"Authorization": f"Bearer {secret}"} if secret else self._headers
        async with self._request("GET", url, headers=headers) as response:
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                return response.status, None

    async def complete(self, messages: list[Message], *, max_tokens: int, **fields: Any) -> ChatCompletion:
        """A chat completion in one JSON.  Raises NoAnswerError."""
        async with self._post(messages, max_tokens=max_tokens, **fields) as response:
            body = await response.read()
        try:
            return responses.parse_completion(json.loads(body))
        except ValueError:
            raise NoAnswerError(f"the answer is no JSON: {body[:80]!r}", response.status) from None
        except MalformedAnswerError as error:
            raise NoAnswerError(f"the answer is no chat completion: {error}", response.status) from None

    async def stream(self, messages: list[Message], *, max_tokens: int, **fields: Any) -> ChatCompletion:
        """The same, streamed and put together again."""
        fold = StreamFold()
        async with self.open_stream(messages, max_tokens=max_tokens, **fields) as events:
            async for event in events:
                if event.data:
                    fold.add(event.data)
        return fold.build()

    @asynccontextmanager
    async def open_stream(
        self, messages: list[Message], *, max_tokens: int, **fields: Any
    ) -> AsyncIterator[AsyncIterator[SseEvent]]:
        """A stream's events as they come.  Leaving the context early drops the connection.

        A MalformedAnswerError of the context becomes a NoAnswerError.
        """
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        async with self._post(messages, max_tokens=max_tokens, **fields) as response:
            try:
                yield _read_events(response)
            except MalformedAnswerError as error:
                raise NoAnswerError(f"the stream is none of chat completions: {error}", 200) from None

    @asynccontextmanager
    async def _post(self, messages: list[Message], **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        body = {"model": self.model, "messages": messages, "temperature": 0, **NO_REASONING, **fields}
        async with self._request("POST", self.url + CHAT_PATH, headers=self._headers, json=body) as response:
            if response.status != 200:
                reason = responses.format_error_body(await response.read())
                raise NoAnswerError(f"answered {response.status}: {reason}", response.status)
            yield response

    @asynccontextmanager
    async def _request(self, method: str, url: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        try:
            async with self._session.request(method, url, **options) as response:
                yield response
        except TimeoutError:
            raise NoAnswerError(f"no whole answer within {self.timeout_s:g} s (--timeout-s)") from None
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachableError(f"nothing answers at {url}: {error.strerror or error}") from None
        except aiohttp.InvalidURL:
            raise ServerUnreachableError(f"{url} is no address") from None
        except aiohttp.ClientError as error:
            raise NoAnswerError(f"the connection broke in mid-answer: {error}") from None


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[SseEvent]:
    parser = SseParser()
    async for piece in response.content.iter_any():
        for event in parser.feed(piece):
            yield event
        if parser.buffered_bytes > EVENT_BYTES_MAX:
            raise NoAnswerError(f"the stream can't be read: an event of more than {EVENT_BYTES_MAX >> 20} MiB", 200)
