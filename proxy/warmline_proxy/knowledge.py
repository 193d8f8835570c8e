"""Keeps the mirror and the backend's status fresh: the acting half of `mirror.py`."""

import asyncio

from warmline_proxy.mirror import Mirror
from warmline_proxy.plan import Costs
from warmline_proxy.upstream import Upstream
from warmline_wire.keys import namespace
from warmline_wire.messages import Reply, Status


class Knowledge:
    """What is known of the backend.  Refreshes are made one at a time; the rest reads."""

    def __init__(self, upstream: Upstream, tenant: str) -> None:
        self.mirror = Mirror()
        self._upstream = upstream
        self._tenant = tenant
        self._status: Status | None = None
        self._refreshing = asyncio.Lock()

    async def status(self) -> Status:
        """The last status; asked for once where there is none.  Raises UpstreamError."""
        if self._status is None:
            await self.refresh()
        assert self._status is not None
        return self._status

    def costs(self) -> Costs:
        if self._status is None:
            return Costs()
        return Costs(self._status.prefill_rates, self._status.restore_bytes_per_s)

    async def catch_up(self, reply: Reply) -> None:
        """Make the mirror agree with a backend that has moved on since it last looked.  Raises UpstreamError."""
        if not self.mirror.is_behind(reply):
            return
        if reply.boot != self.mirror.boot:
            await self.refresh()
        else:
            await self.prune()

    async def refresh(self) -> None:
        """Status and residents from the start; what the mirror knew and the backend still has is kept."""
        async with self._refreshing:
            status = await self._upstream.status()
            known = self.mirror.ids()
            listing = await self._upstream.residents(ids=True)
            self._status = status
            self.mirror.note(listing)
            self.mirror.keep_only(listing.residents, known)
            self.mirror.add_listed(listing.residents, namespace(status.fingerprint, self._tenant))

    async def prune(self) -> None:
        """Forget what the backend dropped and learn where the rest can be continued; cheap, for it asks for no ids."""
        async with self._refreshing:
            known = self.mirror.ids()
            listing = await self._upstream.residents(ids=False, patient=False)
            self.mirror.note(listing)
            self.mirror.keep_only(listing.residents, known)

    async def measure(self) -> None:
        """Take over the rates that the backend has measured since."""
        status = await self._upstream.status(patient=False)
        if self._status is None or status.boot == self._status.boot:
            self._status = status
