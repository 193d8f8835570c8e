"""Save sources: the KV that a save names, in a resident or a running request.  Engine thread."""

from dataclasses import dataclass

from warmline_backend.kv_cache.kv import KV, RowsUnavailableError
from warmline_backend.kv_cache.residents import UNSAVED_LEASE_S, ResidentNotFoundError, Residents
from warmline_backend.scheduler.queues import Queues


@dataclass(frozen=True)
class _KvPrefix:
    """The first `token_count` tokens of a KV."""

    kv: KV
    token_count: int
    resident_id: str = ""
    is_running: bool = False  # held by a running request: more of it is still to be saved


class SaveSource:
    """Lookup of the KV for a save, also after a request has taken it over."""

    def __init__(self, queues: Queues, residents: Residents) -> None:
        self._queues, self._residents = queues, residents

    def find_kv(self, end: int, *, resident_id: str = "", running_id: str = "") -> KV:
        """Return the KV with the first `end` tokens of a resident or a running request.

        A request that took the resident over stands for it, and so does the resident that a request left, as far as
        its tokens are the same.
        Raises ResidentNotFoundError, or RowsUnavailableError where fewer tokens are left.
        """
        prefix = self._find_prefix(resident_id, running_id)
        if end > prefix.token_count:
            raise RowsUnavailableError(f"{prefix.token_count} tokens can be saved, {end} were asked for")
        self._residents.renew_lease(prefix.resident_id, UNSAVED_LEASE_S)  # a save is under way
        return prefix.kv

    def mark_saved(self, resident_id: str, running_id: str, end: int) -> None:
        """Release the journal rows below `end`, which are on disk, and the states too where nothing is left to save."""
        try:
            prefix = self._find_prefix(resident_id, running_id)
        except ResidentNotFoundError:
            return
        if end > prefix.token_count:
            return
        whole = end == prefix.token_count and not prefix.is_running
        prefix.kv.release_saved(end, states=whole)
        self._residents.mark_saved(prefix.resident_id, whole=whole)

    def _find_prefix(self, resident_id: str, running_id: str) -> _KvPrefix:
        if running_id and (sequence := self._queues.find_leader(running_id)) is not None:
            savable_length = min(sequence.kv.savable_length, sequence.sent_length)
            return _KvPrefix(sequence.kv, savable_length, is_running=True)
        resident_id = resident_id or self._residents.find_by_request(running_id)
        found = self._residents.find_successor(resident_id)
        if (kv := self._residents.find_kv(found.resident_id)) is not None:
            return _KvPrefix(kv, min(kv.length, found.tokens), found.resident_id)
        for sequence in self._queues:
            if (adoption := sequence.adoption) and adoption.resident_id == found.resident_id:
                return _KvPrefix(sequence.kv, min(adoption.tokens, found.tokens))
        raise ResidentNotFoundError(resident_id or running_id)
