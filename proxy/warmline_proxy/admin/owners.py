"""GET /warmline/whose: owners of stored conversations, by the present keys."""

import asyncio
from collections.abc import Iterable

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

    async def resolve_owners(self, running_roots: Iterable[bytes] = ()) -> OwnerLabels:
        """Labels of all stored and resident roots, and of `running_roots`.  Raises IndexStoreError."""
        if (changes := self._index.change_count) != self._seen_change_count:
            index, old = self._index, self._fingerprint_by_root
            self._fingerprint_by_root = await asyncio.to_thread(
                lambda: find_fingerprints(index.home, index.segments(), old)
            )
            self._seen_change_count = changes
        served, stored = self._backend_state.fingerprint, self._fingerprint_by_root
        unsaved = self._backend_state.resident_view.non_durable_entries()
        in_memory = {*running_roots, *(entry.root for _, entry in unsaved)}
        fingerprints = stored | {root: stored.get(root) or served for root in in_memory}
        return build_owner_labels(self._keys.key_tenants, fingerprints, served)
