"""What saves read: residents, and the KV of running requests.  Engine thread."""

from dataclasses import dataclass

from warmline_backend.kv_cache.kv import KV, RowsGone
from warmline_backend.kv_cache.residents import UNSAVED_S, ResidentGone, Residents
from warmline_backend.scheduler.queues import Lineup


@dataclass(frozen=True)
class _Held:
    """A KV whose first `tokens` tokens are meant."""

    kv: KV
    tokens: int
    resident: str = ""  # its id, where it is at rest
    grows: bool = False  # it is a running request's own: there will be more to save


class Saving:
    """Finds what a save names, wherever it has gone meanwhile."""

    def __init__(self, lineup: Lineup, residents: Residents) -> None:
        self._lineup, self._residents = lineup, residents

    def kv_of(self, until: int, resident: str, running: str) -> KV:
        """As Scheduler.kv_of."""
        held = self._held(resident, running)
        if until > held.tokens:
            raise RowsGone(f"{held.tokens} tokens can be saved, {until} were asked for")
        self._residents.renew(held.resident, UNSAVED_S)  # whoever asks is saving it
        return held.kv

    def saved(self, resident: str, running: str, until: int) -> None:
        """As Scheduler.saved."""
        try:
            held = self._held(resident, running)
        except ResidentGone:
            return
        if until > held.tokens:
            return
        whole = until == held.tokens and not held.grows
        held.kv.forget_saved(until, states=whole)
        self._residents.saved(held.resident, whole=whole)

    def _held(self, resident: str, running: str) -> _Held:
        if running and (sequence := self._lineup.find(running)) is not None:
            return _Held(sequence.kv, sequence.kv.end, grows=True)
        resident = resident or self._residents.left_by(running)
        if (kv := self._residents.kv(resident)) is not None:
            return _Held(kv, kv.length, resident)
        for sequence in self._lineup:
            if resident and sequence.adopted == resident:
                return _Held(sequence.kv, sequence.reused)
        raise ResidentGone(resident or running)
