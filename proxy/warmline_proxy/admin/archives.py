"""POST /warmline/import: adds an archive on this machine to the home."""

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from warmline_proxy.archive import importer
from warmline_proxy.archive.reader import open_archive
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.auth.key_store import KeyStoreError
from warmline_proxy.auth.owners import load_key_tenants
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import json_response, read_message
from warmline_proxy.index.index import DiskBudgetError, Index
from warmline_proxy.store.errors import wrap_error
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import UpstreamError


class _ImportCancelledError(Exception):
    """The importing client has disconnected."""


@dataclass(eq=False)
class ArchiveRoutes:
    """Import handler.  Saves and restores continue during an import."""

    index: Index
    backend_state: BackendState
    config: ProxyConfig

    async def import_archive(self, request: web.Request) -> web.Response:
        """Import an archive and answer when all of it is stored.  A disconnect cancels it and removes its files."""
        timeout_s = self.config.receive_timeout_s
        import_request = await read_message(request, importer.ImportRequest, "valid import", timeout_s)
        if not Path(import_request.path).is_absolute():
            raise bad_request(f"path must be absolute, not {import_request.path[:200]!r}.", param="path")
        known_models, cancel_event = await self._find_known_models(), threading.Event()
        try:
            reply = await asyncio.to_thread(self._run_import, import_request, known_models, cancel_event)
        except asyncio.CancelledError:
            cancel_event.set()
            raise
        except KeyStoreError as error:
            raise bad_request(str(error), param="key") from error
        except ArchiveError as error:
            raise bad_request(str(error), code="bad_archive") from error
        except DiskBudgetError as error:
            raise bad_request(f"there is no room for it: {error}", status=409, code="no_room") from error
        except OSError as error:
            raise wrap_error("can't be written", error) from error
        return json_response(reply)

    async def _find_known_models(self) -> importer.KnownModels:
        """The served model; while the backend is down, all models with stored segments."""
        try:
            if (status := await self.backend_state.status()).fingerprint:
                what = f"the model served here is {status.model}, {status.fingerprint[: importer.FINGERPRINT_DIGITS]}"
                return importer.KnownModels(fingerprints=[status.fingerprint], description=what)
        except UpstreamError:
            pass
        return await asyncio.to_thread(importer.find_known_models, self.index)

    def _run_import(
        self, import_request: importer.ImportRequest, known_models: importer.KnownModels, cancel_event: threading.Event
    ) -> importer.ImportReply:
        """Run the import on a thread."""

        def progress(done: int, total: int) -> None:
            if cancel_event.is_set():
                raise _ImportCancelledError

        config = self.config
        key_tenants = load_key_tenants(config.home, client_key=config.client_key, share_cache=config.share_cache)
        tenant = key_tenants.find_tenant(import_request.key)
        with open_archive(Path(import_request.path)) as archive:
            return importer.import_archive(
                self.index, archive, tenant, known_models, anyway=import_request.anyway, progress=progress
            )
