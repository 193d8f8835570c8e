"""What saves read: residents, and the KV of running requests.  Engine thread."""

from dataclasses import dataclass

from warmline_backend.kv_cache.kv import KV, RowsUnavailableError
from warmline_backend.kv_cache.residents import UNSAVED_LEASE_S, ResidentNotFoundError, Residents
from warmline_backend.scheduler.queues import Queues


@dataclass(frozen=True)
class _KvPrefix:
    """A KV whose first `tokens` tokens are meant."""

    kv: KV
    token_count: int
    resident_id: str = ""  # its id, where it is at rest
    is_running: bool = False  # it is a running request's own: there will be more to save


class SaveSource:
    """Finds what a save names, wherever it has gone meanwhile."""

    def __init__(self, queues: Queues, residents: Residents) -> None:
        self._queues, self._residents = queues, residents

    def find_kv(self, end: int, resident_id: str, running_id: str) -> KV:
        """As Scheduler.kv_of."""
        held = self._find_prefix(resident_id, running_id)
        if end > held.token_count:
            raise RowsUnavailableError(f"{held.token_count} tokens can be saved, {end} were asked for")
        self._residents.renew_lease(held.resident_id, UNSAVED_LEASE_S)  # whoever asks is saving it
        return held.kv

    def mark_saved(self, resident_id: str, running_id: str, end: int) -> None:
        """As Scheduler.saved."""
        try:
            held = self._find_prefix(resident_id, running_id)
        except ResidentNotFoundError:
            return
        if end > held.token_count:
            return
        whole = end == held.token_count and not held.is_running
        held.kv.release_saved(end, states=whole)
        self._residents.mark_saved(held.resident_id, whole=whole)

    def _find_prefix(self, resident_id: str, running_id: str) -> _KvPrefix:
        if running_id and (sequence := self._queues.find(running_id)) is not None:
            return _KvPrefix(sequence.kv, sequence.kv.savable_length, is_running=True)
        resident_id = resident_id or self._residents.find_by_request(running_id)
        if (kv := self._residents.find_kv(resident_id)) is not None:
            return _KvPrefix(kv, kv.length, resident_id)
        for sequence in self._queues:
            if resident_id and sequence.adopted_resident_id == resident_id:
                return _KvPrefix(sequence.kv, sequence.reused_tokens)
        raise ResidentNotFoundError(resident_id or running_id)
