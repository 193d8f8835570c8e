"""Client of the keeper, which starts and stops the backends of several models.

    KeeperCallError
    ├── KeeperUnreachableError    no keeper listens, or it does not answer
    └── KeeperRefusalError        an HTTP status of 400 or more; `body` is the keeper's error object

Event loop thread.
"""

from urllib.parse import quote

import httpx
import msgspec

from warmline_common.protocol.keeper import LoadRequest, ModelsReply, PinModelRequest
from warmline_common.protocol.messages import ErrorReply, decode, encode, redact_error_message
from warmline_proxy.upstream.transport import ControlTransport, UpstreamRequest

CALL_TIMEOUT_S = 60.0  # a load first takes memory from other models
POLL_MARGIN_S = 5.0  # beyond the wait of a poll


class KeeperCallError(Exception):
    """Failure of a call to the keeper."""


class KeeperUnreachableError(KeeperCallError):
    """No keeper listens, or it does not answer."""


class KeeperRefusalError(KeeperCallError):
    """HTTP status of 400 or more."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(redact_error_message(body))
        self.status, self.body = status, body

    @property
    def code(self) -> str:
        try:
            return decode(self.body, ErrorReply).error.code or ""
        except msgspec.DecodeError:
            return ""


class KeeperClient:
    """Calls of one keeper.  Methods raise KeeperCallError and nothing else."""

    def __init__(self, base_url: str, secret: str) -> None:
        self._base_url, self._headers = base_url, {"Authorization": f"Bearer {secret}"}
        self._transport = ControlTransport()

    async def close(self) -> None:
        await self._transport.close()

    async def fetch_models(self, version: int, wait_s: float) -> ModelsReply:
        """Fetch the states of all models, once they are of another version, or after `wait_s`."""
        path = f"/keeper/models?version={version}&wait_s={wait_s:g}"
        return await self._call("GET", path, timeout_s=wait_s + POLL_MARGIN_S)

    async def load(self, name: str, kv_bytes: int = 0) -> ModelsReply:
        """Begin to load a model, or give a loaded one so much memory for KV."""
        return await self._call("POST", _build_path(name, "load"), LoadRequest(kv_bytes=kv_bytes))

    async def prepare(self, name: str, kv_bytes: int = 0) -> ModelsReply:
        """Have all but a model's weights prepared: its load follows once there is memory."""
        return await self._call("POST", _build_path(name, "prepare"), LoadRequest(kv_bytes=kv_bytes))

    async def unload(self, name: str) -> ModelsReply:
        """Begin to unload a model."""
        return await self._call("POST", _build_path(name, "unload"))

    async def pin(self, name: str, pinned: bool) -> ModelsReply:
        return await self._call("POST", _build_path(name, "pin"), PinModelRequest(pinned=pinned))

    async def _call(
        self, method: str, path: str, message: object = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> ModelsReply:
        body = b"" if message is None else encode(message)
        headers = {**self._headers, "Content-Type": "application/json"} if body else self._headers
        request = UpstreamRequest(method, self._base_url + path, headers, body, timeout_s)
        try:
            response = await self._transport.send(request)
            content = await response.read()
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise KeeperUnreachableError(f"the keeper does not answer ({type(error).__name__})") from error
        if response.status >= 400:
            raise KeeperRefusalError(response.status, content)
        try:
            return decode(content, ModelsReply)
        except msgspec.DecodeError as error:
            raise KeeperUnreachableError("what answers at the keeper's address is no keeper") from error


def _build_path(name: str, verb: str) -> str:
    return f"/keeper/models/{quote(name, safe='')}/{verb}"
