"""The radix trees as plain values, and for people: a node is a run of segments without a fork.  Pure."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text
from rich.tree import Tree

from warmline_cachectl.views.columns import printable
from warmline_cachectl.views.tables import format_count, format_size
from warmline_proxy.auth.owners import OwnerLabels
from warmline_proxy.store.rows import CheckpointRow, IndexSnapshot, SegmentRow, SessionRow

View = dict[str, Any]
LINES_MAX = 200  # for people; --json has all


@dataclass(frozen=True)
class Forest:
    snapshot: IndexSnapshot
    children: dict[str, list[SegmentRow]]  # by the parent's id; "" has the roots
    checkpoints: dict[str, list[CheckpointRow]]  # by the segment's id, ordered by position
    session_counts: Counter[str]  # number of conversations that contain a segment
    sessions_by_leaf: dict[str, list[SessionRow]]  # by the id of the last segment, last used first
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
        """Bytes of a segment and its checkpoints."""
        return row.bytes_on_disk + sum(state.bytes_on_disk for state in self.checkpoints.get(row.id, ()))


def build_tree(forest: Forest, depth_max: int = 0) -> View:
    """Nodes as a flat list, parents first; `depth_max` forks deep (0: all).

    `bytes` and `segments` are the node's own, `bytes_below` and `segments_below` include its descendants'.
    """
    nodes: dict[str, View] = {}
    waiting = [(row, "", 1) for row in reversed(forest.children.get("", []))]
    while waiting:
        first, parent, depth = waiting.pop()
        links = _collect_run(forest, first)
        node = nodes[links[-1].id] = _build_node(forest, links, parent, depth)
        waiting += [(child, node["id"], depth + 1) for child in reversed(forest.children.get(node["id"], []))]
    for node in reversed(nodes.values()):
        if above := nodes.get(node["parent"]):
            above["bytes_below"] += node["bytes_below"]
            above["segments_below"] += node["segments_below"]
    shown = [node for node in nodes.values() if not depth_max or node["depth"] <= depth_max]
    return {"trees": _build_trees(nodes.values()), "nodes": shown, "omitted": len(nodes) - len(shown)}


def _collect_run(forest: Forest, row: SegmentRow) -> list[SegmentRow]:
    """Segments from this one to the next fork, or to the end of a conversation."""
    links = [row]
    while links[-1].id not in forest.sessions_by_leaf:
        children = forest.children.get(links[-1].id, [])
        if len(children) != 1 or children[0].start != links[-1].end:
            break
        links += children
    return links


def _build_node(forest: Forest, links: list[SegmentRow], parent: str, depth: int) -> View:
    weight = sum(map(forest.total_bytes, links))
    return {
        "id": links[-1].id,
        "parent": parent,
        "root": links[0].root.hex(),
        "key": forest.owner_labels.find_label(links[0].root),
        "model": links[0].model,
        "depth": depth,
        "start": links[0].start,
        "end": links[-1].end,
        "segments": len(links),
        "checkpoints": sum(len(forest.checkpoints.get(link.id, ())) for link in links),
        "bytes": weight,
        "bytes_below": weight,
        "segments_below": len(links),
        "pinned": all(link.pinned for link in links),
        "sessions": [
            {"id": row.id, "title": row.title, "client": row.client}
            for row in forest.sessions_by_leaf.get(links[-1].id, ())
        ],
    }


def _build_trees(nodes: Iterable[View]) -> list[View]:
    """Totals of each namespace (a model with its key), largest first."""
    trees: dict[str, View] = {}
    for node in nodes:
        new = {name: node[name] for name in ("root", "key", "model")}
        row = trees.setdefault(node["root"], new | {"segments": 0, "checkpoints": 0, "bytes": 0, "sessions": 0})
        for name in ("segments", "checkpoints", "bytes"):
            row[name] += node[name]
        row["sessions"] += len(node["sessions"])
    return sorted(trees.values(), key=lambda row: -row["bytes"])


# --- for people ---


def render_tree(view: View, lines_max: int = LINES_MAX) -> list[Tree | str]:
    """Tree of each namespace, with its heaviest nodes where there are more than `lines_max`."""
    if not view["trees"]:
        return ["nothing is stored"]
    below: dict[str, list[View]] = {}
    for node in view["nodes"]:
        below.setdefault(node["parent"] or node["root"], []).append(node)
    chosen = _choose_heaviest(below, [row["root"] for row in view["trees"]], lines_max)
    return [_render_branches(row, below, chosen) for row in view["trees"]]


def _choose_heaviest(below: dict[str, list[View]], roots: list[str], count_max: int) -> set[str]:
    """Ids of the heaviest nodes and their ancestors."""
    heap = [(-node["bytes_below"], node["id"]) for root in roots for node in below.get(root, ())]
    heapq.heapify(heap)
    chosen: set[str] = set()
    while heap and len(chosen) < count_max:
        _, node_id = heapq.heappop(heap)
        chosen.add(node_id)
        for child in below.get(node_id, ()):
            heapq.heappush(heap, (-child["bytes_below"], child["id"]))
    return chosen


def _render_branches(row: View, below: dict[str, list[View]], chosen: set[str]) -> Tree:
    name = f"{row['key'] and row['key'] + ', '}{row['model']} ({row['root'][:8]})"
    sessions, segments = format_count(row["sessions"], "conversation"), format_count(row["segments"], "segment")
    trunk = Tree(_render_line(f"{name}: {sessions}, {segments}, {format_size(row['bytes'])}"))
    waiting = [(row["root"], trunk)]
    while waiting:
        above, branch = waiting.pop()
        nodes = below.get(above, [])
        for node in nodes:
            if node["id"] in chosen:
                waiting.append((node["id"], branch.add(_render_line(_format_label(node)))))
        if hidden := [node for node in nodes if node["id"] not in chosen]:
            weight = format_size(sum(node["bytes_below"] for node in hidden))
            branch.add(f"… {format_count(len(hidden), 'more branch', 'more branches')}, {weight}")
    return trunk


def _render_line(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _format_label(node: View) -> str:
    words = [f"{node['start']:,}-{node['end']:,}", node["id"][:8], format_size(node["bytes"])]
    if node["segments"] > 1:
        words.append(f"in {node['segments']} segments")
    if node["checkpoints"]:
        words.append(format_count(node["checkpoints"], "checkpoint"))
    if node["pinned"]:
        words.append("pinned")
    ends = [f"{row['id']} {row['title'] or row['client']}".strip() for row in node["sessions"][:3]]
    more = len(node["sessions"]) - len(ends)
    return "  ".join(words) + (f"  ● {', '.join(ends)}" if ends else "") + (f" and {more} more" if more > 0 else "")
