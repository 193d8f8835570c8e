"""POST /warmline/import: an archive that the owner names becomes part of the home."""

import asyncio
import threading
from pathlib import Path

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import decode
from warmline_proxy.admin.routes import Paths
from warmline_proxy.archive.importer import (
    SHOWN,
    Imported,
    ImportRequest,
    Known,
    import_archive,
    known_from_files,
)
from warmline_proxy.archive.reader import open_archive
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.auth.key_store import KeysUnusable
from warmline_proxy.auth.owners import holders
from warmline_proxy.config import Config
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import json_answer, read_body
from warmline_proxy.index.index import Index, NoRoom
from warmline_proxy.store.errors import failure
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import UpstreamError


class _GivenUp(Exception):
    """Nobody waits for it any more."""


class Moving:
    """Its one handler.  Saves and restores go on meanwhile."""

    def __init__(self, index: Index, knowledge: Knowledge, config: Config) -> None:
        self._index, self._knowledge, self._config = index, knowledge, config

    @property
    def paths(self) -> Paths:
        return {("POST", "/warmline/import"): self.import_}

    async def import_(self, request: web.Request) -> web.Response:
        """Answers when all of it is stored.  A caller that leaves ends it, and nothing is left."""
        try:
            wanted = decode(await read_body(request, self._config.receive_timeout_s), ImportRequest)
        except msgspec.DecodeError as error:
            raise bad_request(f"Not an import: {error}") from error
        if not Path(wanted.path).is_absolute():
            raise bad_request(f"path must be absolute, not {wanted.path[:200]!r}.", param="path")
        known, given_up = await self._known(), threading.Event()
        try:
            reply = await asyncio.to_thread(self._import, wanted, known, given_up)
        except asyncio.CancelledError:
            given_up.set()
            raise
        except KeysUnusable as error:
            raise bad_request(str(error), param="key") from error
        except ArchiveError as error:
            raise bad_request(str(error), code="bad_archive") from error
        except NoRoom as error:
            raise bad_request(f"there is no room for it: {error}", status=409, code="no_room") from error
        except OSError as error:
            raise failure("can't be written", error) from error
        return json_answer(reply)

    async def _known(self) -> Known:
        """The served model; while none answers, those of which something is stored."""
        try:
            if (status := await self._knowledge.status()).fingerprint:
                what = f"the model served here is {status.model}, {status.fingerprint[:SHOWN]}"
                return Known(fingerprints=[status.fingerprint], what=what)
        except UpstreamError:
            pass
        return await asyncio.to_thread(known_from_files, self._index)

    def _import(self, wanted: ImportRequest, known: Known, given_up: threading.Event) -> Imported:
        """On a thread."""

        def progress(done: int, total: int) -> None:
            if given_up.is_set():
                raise _GivenUp

        config = self._config
        keys = holders(config.home, client_key=config.client_key, share_cache=config.share_cache)
        tenant = keys.tenant(wanted.key)
        with open_archive(Path(wanted.path)) as archive:
            return import_archive(self._index, archive, tenant, known, anyway=wanted.anyway, progress=progress)
