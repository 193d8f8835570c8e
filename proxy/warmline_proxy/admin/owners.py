"""GET /warmline/whose: owners of stored conversations, by the present keys."""

import asyncio
from collections.abc import Iterable, Mapping

from aiohttp import web

from warmline_proxy.auth.owners import OwnerLabels, build_owner_labels, find_fingerprints
from warmline_proxy.auth.principals import ClientKeys
from warmline_proxy.http.bodies import json_response
from warmline_proxy.index.index import Index
from warmline_proxy.upstream.backend_state import BackendState


class OwnerResolver:
    """Owner labels of roots, with their handler.  Event loop thread.

    A root's model never changes, so each root's files are read once; keys change.
    """

    def __init__(self, index: Index, keys: ClientKeys, backend_state: BackendState) -> None:
        self._index, self._keys, self._backend_state = index, keys, backend_state
        self._fingerprint_by_root: dict[bytes, str] = {}
        self._seen_change_count = -1  # the index's at the last read

    async def get_owners(self, request: web.Request) -> web.Response:
        return json_response(await self.resolve_owners())

    async def resolve_owners(
        self, running_roots: Iterable[bytes] = (), response_fingerprints: Mapping[bytes, str] | None = None
    ) -> OwnerLabels:
        """Labels of all stored and resident roots, of `running_roots`, and of those of stored responses, if given.

        Raises IndexStoreError.
        """
        if (changes := self._index.change_count) != self._seen_change_count:
            index, old = self._index, self._fingerprint_by_root
            self._fingerprint_by_root = await asyncio.to_thread(
                lambda: find_fingerprints(index.home, index.segments(), old)
            )
            self._seen_change_count = changes
        served, stored = self._backend_state.fingerprint, self._fingerprint_by_root
        unsaved = self._backend_state.resident_view.non_durable_entries()
        in_memory = {*running_roots, *(entry.root for _, entry in unsaved)}
        readable = {root: fingerprint for root, fingerprint in stored.items() if fingerprint}
        fingerprints = {**dict.fromkeys(in_memory, served), **(response_fingerprints or {}), **readable}
        return build_owner_labels(self._keys.key_tenants, fingerprints, served)
