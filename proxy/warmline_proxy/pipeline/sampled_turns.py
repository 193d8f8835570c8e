"""What the model sampled when it called tools, by call id: sent along with the prompt when its client repeats the call.

In memory at once, for a tool may answer within a millisecond; in the index a second later.  Event loop thread.
"""

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from warmline_common.protocol.messages import SampledTurn
from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.index.turns import CALL_ID
from warmline_proxy.store.rows import TurnRow

log = logging.getLogger(__name__)

CALL_IDS_MAX = 4096  # of one request; those in its latest messages count
TURN_TOKEN_BYTES_MAX = 1 << 20  # a longer turn is not remembered
KEPT_MAX = 8192  # turns in memory
KEPT_BYTES_MAX = 32 << 20
_CALL_ID = re.compile(CALL_ID.pattern.encode())


class Turns:
    """Of all tenants; each is found under its own namespace alone."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._kept: OrderedDict[tuple[bytes, str], SampledTurn] = OrderedDict()  # by namespace and first call
        self._firsts: dict[tuple[bytes, str], str] = {}  # each call's turn, by its first call
        self._bytes = 0

    def remember(self, root: bytes, model: str, turn: SampledTurn, session: str = "") -> None:
        """`root`: the namespace of model and tenant.  Told again once it is known to which conversation it belongs."""
        if not turn.calls or len(turn.tokens) > TURN_TOKEN_BYTES_MAX or not all(map(CALL_ID.fullmatch, turn.calls)):
            return
        self._keep(root, turn)
        row = TurnRow(root=root, model=model, session=session, calls=turn.calls, tokens=turn.tokens, at=time.time())
        self._index.note_turn(row)

    def recall(self, root: bytes, messages: Any) -> list[SampledTurn]:
        """The turns whose calls are in these messages (JSON as it came, or its value), as far as they are known."""
        wanted = list(dict.fromkeys(id_.decode() for id_ in _CALL_ID.findall(_as_json(messages))))[-CALL_IDS_MAX:]
        found: dict[str, SampledTurn] = {}
        unknown = []
        for call_id in wanted:
            if turn := self._kept.get((root, self._firsts.get((root, call_id), ""))):
                found[turn.calls[0]] = turn
            else:
                unknown.append(call_id)
        for turn in self._stored(root, unknown):
            self._keep(root, turn)
            found[turn.calls[0]] = turn
        return list(found.values())

    def forget(self) -> None:
        """What is in memory; the index keeps what it has."""
        self._kept.clear()
        self._firsts.clear()
        self._bytes = 0

    def _stored(self, root: bytes, call_ids: Iterable[str]) -> list[SampledTurn]:
        if not (wanted := list(call_ids)):
            return []
        try:
            return [SampledTurn(calls=row.calls, tokens=row.tokens) for row in self._index.turns(root, wanted)]
        except IndexFailure as error:
            log.warning("sampled turns can't be read, so calls are rendered anew: %s", error)
            return []

    def _keep(self, root: bytes, turn: SampledTurn) -> None:
        key = (root, turn.calls[0])
        if key in self._kept:
            self._drop(key)
        self._kept[key] = turn
        self._bytes += len(turn.tokens)
        self._firsts.update(((root, call_id), turn.calls[0]) for call_id in turn.calls)
        while len(self._kept) > KEPT_MAX or self._bytes > KEPT_BYTES_MAX:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[bytes, str]) -> None:
        turn = self._kept.pop(key)
        self._bytes -= len(turn.tokens)
        for call_id in turn.calls:
            self._firsts.pop((key[0], call_id), None)


def _as_json(messages: Any) -> bytes:
    return b"" if messages is None else msgspec.json.encode(messages)
