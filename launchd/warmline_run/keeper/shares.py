"""Shares of the memory, and their way to the backends.  Event loop thread; callers hold the keeper's memory lock."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from warmline_common.protocol.keeper import ModelStage
from warmline_common.protocol.messages import MemoryShare
from warmline_run.keeper.backends.backend_client import BackendClient, BackendUnreachableError
from warmline_run.keeper.memory import Holders, MemoryHolder, divide_memory, divide_usable_bytes
from warmline_run.keeper.models import KeptModel

log = logging.getLogger(__name__)


class MemoryShares:
    """Budgets in force of all models that hold memory."""

    def __init__(self, models: Mapping[str, KeptModel], client: BackendClient) -> None:
        self._models, self._client = models, client
        self._silent: set[str] = set()  # that did not answer in the present change, and are not asked again in it

    def list_holders(self, excluded: str = "") -> dict[str, MemoryHolder]:
        return {
            name: model.make_holder() for name, model in self._models.items() if model.holds_memory and name != excluded
        }

    def sum_claimed_bytes(self, excluded: str) -> int:
        """All that the processes of the others may take by now."""
        return sum(model.claimed_bytes for name, model in self._models.items() if name != excluded)

    async def shrink(self, added: Holders, total: int, first: str) -> None:
        """Shrink the loaded models as far as `first`, and holders that are yet to be `added`, need."""
        self._silent.clear()
        holders = {**self.list_holders(), **added}
        budgets = divide_memory(holders, total, first)
        asked = {name: replace(each, kv_bytes=min(each.kv_bytes, budgets[name])) for name, each in holders.items()}
        await self._lower(asked, added, total)
        await self._lower({**self.list_holders(), **added}, added, total)  # where more KV was granted than asked

    async def rebalance(self, total: int, first: str = "") -> None:
        """Shrink models that have more than their part, then grow the others by what is free, `first` first."""
        await self.shrink({}, total, first)
        present = self.list_holders()
        budgets = divide_memory({name: replace(each, can_shrink=False) for name, each in present.items()}, total, first)
        grown = {name: replace(each, kv_bytes=budgets[name]) for name, each in present.items()}
        usable = divide_usable_bytes(grown, total)
        await self._send_shares(
            {name: self._make_lower_share(name, self._models[name].kv_bytes, usable) for name in grown}
        )
        if all(self._models[name].claimed_bytes <= usable[name] for name in grown):
            await self._send_shares(
                {name: MemoryShare(kv_bytes=budgets[name], usable_bytes=usable[name]) for name in grown}
            )

    async def _lower(self, holders: Holders, added: Holders, total: int) -> None:
        """Have the loaded models take no more than `holders` leave them; none gets more."""
        usable = divide_usable_bytes(holders, total)
        loaded = [name for name in holders if name not in added]
        await self._send_shares({name: self._make_lower_share(name, holders[name].kv_bytes, usable) for name in loaded})

    def _make_lower_share(self, name: str, kv_bytes: int, usable: Mapping[str, int]) -> MemoryShare:
        return MemoryShare(kv_bytes=kv_bytes, usable_bytes=min(usable[name], self._models[name].usable_bytes))

    async def _send_shares(self, shares: Mapping[str, MemoryShare]) -> None:
        """Set shares of loaded models, all at once."""
        await asyncio.gather(*(self._send_share(self._models[name], share) for name, share in shares.items()))

    async def _send_share(self, model: KeptModel, share: MemoryShare) -> None:
        """Set a share.  Where the answer is lost, the larger one counts: it may be in force."""
        state, starts, wanted = model.process.state, model.process.state.starts, (share.kv_bytes, share.usable_bytes)
        is_sent = model.is_share_sure and wanted == (model.kv_bytes, model.usable_bytes)
        if state.stage is not ModelStage.LOADED or is_sent or model.name in self._silent:
            return
        usable_bytes, is_sure = share.usable_bytes, True
        try:
            granted = await self._client.set_memory_share(state.port, share)
        except BackendUnreachableError as error:
            log.warning("%s: its share of the memory could not be set: %s", model.name, error)
            self._silent.add(model.name)
            granted, usable_bytes = max(share.kv_bytes, model.kv_bytes), max(usable_bytes, model.usable_bytes)
            is_sure = False
        if state.starts == starts and state.stage in (ModelStage.LOADED, ModelStage.STOPPING):  # else it has another
            model.kv_bytes, model.usable_bytes, model.is_share_sure = granted, usable_bytes, is_sure
