"""GET /warmline/whose: whose what is stored is, by the keys that there are at this moment."""

import asyncio
from collections.abc import Iterable

from aiohttp import web

from warmline_proxy.admin.routes import Paths
from warmline_proxy.auth.owners import Whose, models_of, whose
from warmline_proxy.auth.principals import ClientKeys
from warmline_proxy.http.bodies import json_answer
from warmline_proxy.index.index import Index
from warmline_proxy.upstream.backend_state import Knowledge


class Attribution:
    """Its one handler, and what others here ask.  What it keeps belongs to the event loop.

    Of which model a root is holds for good, so a file is asked once for each; keys come and go.
    """

    def __init__(self, index: Index, keys: ClientKeys, knowledge: Knowledge) -> None:
        self._index, self._keys, self._knowledge = index, keys, knowledge
        self._models: dict[bytes, str] = {}
        self._changes = -1  # of the index, when it was looked at

    @property
    def paths(self) -> Paths:
        return {("GET", "/warmline/whose"): self.answer}

    async def answer(self, request: web.Request) -> web.Response:
        return json_answer(await self.whose())

    async def whose(self, running: Iterable[bytes] = ()) -> Whose:
        """Also of what is in memory alone; `running`: more roots of the served model.  Raises IndexFailure."""
        if (changes := self._index.changes) != self._changes:
            self._models = await asyncio.to_thread(self._look, self._models)
            self._changes = changes
        served = self._knowledge.fingerprint
        in_memory = {*running, *(held.root for _, held in self._knowledge.mirror.not_durable())}
        models = self._models | {root: self._models.get(root) or served for root in in_memory}
        return whose(self._keys.holders, models, served)

    def _look(self, known: dict[bytes, str]) -> dict[bytes, str]:
        return models_of(self._index.home, self._index.segments(), known)
