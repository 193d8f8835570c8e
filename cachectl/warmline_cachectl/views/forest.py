"""What is stored as a forest: who hangs below whom, computed once for all views of one snapshot.  Pure."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from warmline_proxy.auth.owners import OwnerLabels
from warmline_proxy.store.rows import CheckpointRow, IndexSnapshot, SegmentRow, SessionRow


@dataclass(frozen=True)
class Forest:
    snapshot: IndexSnapshot
    children: dict[str, list[SegmentRow]]  # by the parent's id; "" has the roots
    checkpoints: dict[str, list[CheckpointRow]]  # by the segment's id, by position
    session_counts: Counter[str]  # how many conversations stand on a segment
    sessions_by_leaf: dict[str, list[SessionRow]]  # the conversations that end in a segment, last used first
    owner_labels: OwnerLabels = field(default_factory=OwnerLabels)

    @classmethod
    def from_snapshot(cls, snapshot: IndexSnapshot, owner_labels: OwnerLabels | None = None) -> "Forest":
        children, states, ends = defaultdict(list), defaultdict(list), defaultdict(list)
        for row in sorted(snapshot.segments.values(), key=lambda row: (row.start, row.created, row.id)):
            children[row.parent if row.parent in snapshot.segments else ""].append(row)
        for state in sorted(snapshot.checkpoints.values(), key=lambda state: state.position):
            states[state.segment].append(state)
        for session in sorted(snapshot.sessions.values(), key=lambda session: -session.last_used):
            ends[session.leaf].append(session)
        users: Counter[str] = Counter()
        for leaf, sessions in ends.items():
            users.update({link.id: len(sessions) for link in snapshot.segment_path(leaf)})
        return cls(snapshot, dict(children), dict(states), users, dict(ends), owner_labels or OwnerLabels())

    def total_bytes(self, row: SegmentRow) -> int:
        """With its checkpoints."""
        return row.bytes_on_disk + sum(state.bytes_on_disk for state in self.checkpoints.get(row.id, ()))
