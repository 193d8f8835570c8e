"""The server under examination, as any client of OpenAI's API sees it.  One event loop; every wait is bounded."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import aiohttp

from warmline_run.smoke.responses import (
    ChatCompletion,
    MalformedAnswerError,
    Message,
    StreamFold,
    format_error_body,
    parse_completion,
)
from warmline_run.smoke.sse import EventReader, SmokeEvent

CHAT_PATH = "/chat/completions"
BAD_REQUEST = 400  # what a server says that can't do what is asked, and knows it
# A reasoning model would spend what a gate gives it on thoughts.  Servers that don't know it ignore it.
NO_REASONING = {"chat_template_kwargs": {"enable_thinking": False}}


class NoAnswerError(Exception):
    """No answer, or none of OpenAI's form: a line that says what happened.  `status` is 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerUnreachableError(NoAnswerError):
    """Nothing takes connections there."""


class SmokeClient:
    """`url` ends in /v1.  An async context manager, which owns the connections."""

    def __init__(self, url: str, key: str = "", timeout_s: float = 600.0, model: str = "") -> None:
        self.url, self.model = url.rstrip("/"), model
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    async def __aenter__(self) -> "SmokeClient":
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s), connector=aiohttp.TCPConnector(force_close=True)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, path: str, secret: str = "") -> tuple[int, Any]:
        """Status and JSON (None where it is none) of a path under /v1, or, if it begins with "//", beside it."""
        url = self.url.removesuffix("/v1") + path[1:] if path.startswith("//") else self.url + path
        headers = {"Authorization": f"Bearer {secret}"} if secret else self._headers
        async with self._request("GET", url, headers=headers) as response:
            body = await response.read()
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, None

    async def complete(self, messages: list[Message], *, max_tokens: int, **fields: Any) -> ChatCompletion:
        """A chat completion in one JSON.  Raises Unanswered."""
        async with self._post(self._body(messages, max_tokens, fields)) as response:
            body = await response.read()
        try:
            return parse_completion(json.loads(body))
        except ValueError:
            raise NoAnswerError(f"the answer is no JSON: {body[:80]!r}", response.status) from None
        except MalformedAnswerError as error:
            raise NoAnswerError(f"the answer is no chat completion: {error}", response.status) from None

    async def stream(self, messages: list[Message], *, max_tokens: int, **fields: Any) -> ChatCompletion:
        """The same, streamed and put together again."""
        fold = StreamFold()
        try:
            async with self.open_stream(messages, max_tokens=max_tokens, **fields) as events:
                async for event in events:
                    if event.data:
                        fold.add(event.data)
        except MalformedAnswerError as error:
            raise NoAnswerError(f"the stream is none of chat completions: {error}", 200) from None
        return fold.build()

    @asynccontextmanager
    async def open_stream(
        self, messages: list[Message], *, max_tokens: int, **fields: Any
    ) -> AsyncIterator[AsyncIterator[SmokeEvent]]:
        """A stream's events as they come.  Leaving the context early drops the connection."""
        asked = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        async with self._post(self._body(messages, max_tokens, asked)) as response:
            yield _read_events(response)

    def _body(self, messages: list[Message], max_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
        given = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **NO_REASONING, **fields}
        return {"model": self.model, **given}

    @asynccontextmanager
    async def _post(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._request("POST", self.url + CHAT_PATH, headers=self._headers, json=body) as response:
            if response.status != 200:
                raise NoAnswerError(
                    f"answered {response.status}: {format_error_body(await response.read())}", response.status
                )
            yield response

    @asynccontextmanager
    async def _request(self, method: str, url: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        try:
            async with self._session.request(method, url, **options) as response:
                yield response
        except TimeoutError:
            raise NoAnswerError(f"no whole answer within {self._timeout_s:g} s (--timeout-s)") from None
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachableError(f"nothing answers at {url}: {error.strerror or error}") from None
        except aiohttp.InvalidURL:
            raise ServerUnreachableError(f"{url} is no address") from None
        except aiohttp.ClientError as error:
            raise NoAnswerError(f"the connection broke in mid-answer: {error}") from None


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[SmokeEvent]:
    reader = EventReader()
    async for piece in response.content.iter_any():
        try:
            events = list(reader.feed(piece))
        except ValueError as error:
            raise NoAnswerError(f"the stream can't be read: {error}", 200) from None
        for event in events:
            yield event
