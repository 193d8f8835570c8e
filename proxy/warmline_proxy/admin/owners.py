"""GET /warmline/whose: owners of stored conversations, by the present keys."""

import asyncio
from collections.abc import Mapping

from aiohttp import web

from warmline_proxy.auth.owners import OwnerLabels, build_owner_labels, find_fingerprints
from warmline_proxy.auth.principals import ClientKeys
from warmline_proxy.http.bodies import json_response
from warmline_proxy.index.index import Index
from warmline_proxy.models.directory import ServedModels


class OwnerResolver:
    """Owner labels of roots, with their handler.  Event loop thread.

    A root's model never changes, so each root's files are read once; keys change.
    """

    def __init__(self, index: Index, keys: ClientKeys, models: ServedModels) -> None:
        self._index, self._keys, self._models = index, keys, models
        self._fingerprint_by_root: dict[bytes, str] = {}
        self._seen_change_count = -1  # the index's at the last read

    async def get_owners(self, request: web.Request) -> web.Response:
        return json_response(await self.resolve_owners())

    async def resolve_owners(
        self, running_roots: Mapping[bytes, str] | None = None, response_fingerprints: Mapping[bytes, str] | None = None
    ) -> OwnerLabels:
        """Labels of all stored and resident roots, of `running_roots` (fingerprints by root), and of those of stored
        responses, if given.

        Raises IndexStoreError.
        """
        if (changes := self._index.change_count) != self._seen_change_count:
            index, old = self._index, self._fingerprint_by_root
            self._fingerprint_by_root = await asyncio.to_thread(
                lambda: find_fingerprints(index.home, index.segments(), old)
            )
            self._seen_change_count = changes
        readable = {root: fingerprint for root, fingerprint in self._fingerprint_by_root.items() if fingerprint}
        in_memory = {**self._list_unsaved_roots(), **(running_roots or {})}
        fingerprints = {**in_memory, **(response_fingerprints or {}), **readable}
        return build_owner_labels(self._keys.key_tenants, fingerprints, self._models.fingerprints)

    def _list_unsaved_roots(self) -> dict[bytes, str]:
        """Fingerprints of the roots that unsaved residents have."""
        states = [backend.state for backend in self._models.backends]
        return {
            entry.root: state.fingerprint for state in states for _, entry in state.resident_view.non_durable_entries()
        }
