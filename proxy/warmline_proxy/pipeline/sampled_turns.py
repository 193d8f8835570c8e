"""Sampled turns by tool-call id: a turn's tokens are sent with the prompt in which its client repeats the call.

In memory at once, since a tool may answer within a millisecond; in the index a second later.  Event loop thread.
"""

import logging
import re
import time
from collections import OrderedDict
from typing import Any

import msgspec

from warmline_common.protocol.messages import SampledTurn
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.turns import CALL_ID
from warmline_proxy.store.rows import TurnRow

log = logging.getLogger(__name__)

CALL_IDS_MAX = 4096  # looked up in one request, the latest
TURN_TOKEN_BYTES_MAX = 1 << 20  # longer turns are not recorded
TURNS_MAX = 8192  # turns in memory
TURNS_BYTES_MAX = 32 << 20
_CALL_ID = re.compile(CALL_ID.pattern.encode())


class SampledTurnCache:
    """Turns of all tenants, each under its own namespace."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._turns: OrderedDict[tuple[bytes, str], SampledTurn] = OrderedDict()  # by namespace and first call
        self._first_call_ids: dict[tuple[bytes, str], str] = {}  # of each call's turn
        self._token_bytes = 0

    def add(self, root: bytes, model: str, turn: SampledTurn, session: str = "") -> None:
        """Record a turn under a namespace; again with its `session`, once that is known."""
        if not turn.calls or len(turn.tokens) > TURN_TOKEN_BYTES_MAX or not all(map(CALL_ID.fullmatch, turn.calls)):
            return
        self._insert(root, turn)
        row = TurnRow(root=root, model=model, session=session, calls=turn.calls, tokens=turn.tokens, at=time.time())
        self._index.record_turn(row)

    def find(self, root: bytes, messages: Any) -> list[SampledTurn]:
        """Known turns whose calls are in these messages (raw JSON, or its value)."""
        encoded = b"" if messages is None else msgspec.json.encode(messages)
        call_ids = list(dict.fromkeys(id_.decode() for id_ in _CALL_ID.findall(encoded)))[-CALL_IDS_MAX:]
        found: dict[str, SampledTurn] = {}
        missing = []
        for call_id in call_ids:
            if turn := self._turns.get((root, self._first_call_ids.get((root, call_id), ""))):
                found[turn.calls[0]] = turn
            else:
                missing.append(call_id)
        try:
            rows = self._index.turns(root, missing) if missing else []
        except IndexStoreError as error:
            log.warning("sampled turns can't be read, so calls are rendered anew: %s", error)
            rows = []
        for row in rows:
            found[row.calls[0]] = turn = SampledTurn(calls=row.calls, tokens=row.tokens)
            self._insert(root, turn)
        return list(found.values())

    def clear(self) -> None:
        """Drop the turns in memory, not those in the index."""
        self._turns.clear()
        self._first_call_ids.clear()
        self._token_bytes = 0

    def _insert(self, root: bytes, turn: SampledTurn) -> None:
        key = (root, turn.calls[0])
        if key in self._turns:
            self._remove(key)
        self._turns[key] = turn
        self._token_bytes += len(turn.tokens)
        self._first_call_ids.update(((root, call_id), turn.calls[0]) for call_id in turn.calls)
        while len(self._turns) > TURNS_MAX or self._token_bytes > TURNS_BYTES_MAX:
            self._remove(next(iter(self._turns)))

    def _remove(self, key: tuple[bytes, str]) -> None:
        turn = self._turns.pop(key)
        self._token_bytes -= len(turn.tokens)
        for call_id in turn.calls:
            self._first_call_ids.pop((key[0], call_id), None)
