"""Client of the keeper's backends, over loopback.  Event loop thread."""

from contextlib import AbstractAsyncContextManager

import aiohttp
import msgspec

from warmline_common.protocol import messages
from warmline_common.protocol.messages import HealthReply, MemoryShare, MemoryShareReply

HEALTH_TIMEOUT_S = 5.0
MEMORY_TIMEOUT_S = 60.0  # the engine answers after its present step


class BackendUnreachableError(Exception):
    """A backend that doesn't answer, or not as its contract says."""


class BackendClient:
    """Calls of all backends of a home; one connection a call, since a port may be another process's the next time."""

    def __init__(self, secret: str) -> None:
        self._secret = {"Authorization": f"Bearer {secret}"}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def close(self) -> None:
        await self._session.close()

    async def read_health(self, port: int) -> HealthReply:
        """Raises BackendUnreachableError."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        body = await self._read(self._session.get(_format_url(port, "/health"), timeout=timeout))
        return self._decode(body, HealthReply)

    async def set_memory_share(self, port: int, share: MemoryShare) -> int:
        """KV budget in force from now on.  Raises BackendUnreachableError."""
        url, timeout = _format_url(port, "/kv/memory"), aiohttp.ClientTimeout(total=MEMORY_TIMEOUT_S)
        data = messages.encode(share)
        body = await self._read(self._session.put(url, data=data, headers=self._secret, timeout=timeout))
        return self._decode(body, MemoryShareReply).kv_bytes

    async def _read(self, call: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> bytes:
        try:
            async with call as response:
                body = await response.read()
                if response.status != 200:
                    raise BackendUnreachableError(f"{response.url.path}: {response.status}")
                return body
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BackendUnreachableError(type(error).__name__) from None

    def _decode(self, body: bytes, kind: type[messages.T]) -> messages.T:
        try:
            return messages.decode(body, kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise BackendUnreachableError(f"no {kind.__name__}: {error}") from None


def _format_url(port: int, path: str) -> str:
    return f"http://127.0.0.1:{port}{path}"
