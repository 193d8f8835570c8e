"""Columns of a table that does not fit: order of removal; trees of many segments."""

from operator import itemgetter

from warmline_cachectl.views import tree as tree_view
from warmline_cachectl.views.columns import Column, fit_table, printable
from warmline_cachectl.views.tree import Forest
from warmline_proxy.store.rows import FileUsage, IndexSnapshot, SegmentRow

COLUMNS = [
    Column("id", itemgetter(0), kind="id"),
    Column("size", itemgetter(1)),
    Column("hits", itemgetter(2), 2),
    Column("name", itemgetter(3), 1, "text"),
]
ROWS = [["0123456789abcdef" * 2, "1.0 KB", "12", "a rather long name"]]
CHAIN = 3000


def render_table(width: int) -> tuple[list[str], list[int]]:
    table, *_ = fit_table(COLUMNS, ROWS, width)
    assert not isinstance(table, str)
    return [str(column.header) for column in table.columns], [column.width or 0 for column in table.columns]


def test_narrow_table_cuts_ids_then_texts_then_columns() -> None:
    assert render_table(100) == (["id", "size", "hits", "name"], [32, 6, 4, 18])
    assert render_table(60) == (["id", "size", "hits", "name"], [12, 6, 4, 18])
    assert render_table(45) == (["id", "size", "hits", "name"], [12, 6, 4, 10])
    assert render_table(40) == (["id", "size", "name"], [12, 6, 12])
    assert render_table(25) == (["id", "size"], [12, 6])
    assert render_table(5) == (["id", "size"], [12, 6]), "these always stay"


def test_missing_columns_are_reported() -> None:
    assert fit_table(COLUMNS, ROWS, 25)[1] == "(no room for hits, name; --json has all)"
    assert len(fit_table(COLUMNS, ROWS, 100)) == 1


def test_empty_optional_columns_are_omitted_silently() -> None:
    columns = [Column("id", itemgetter(0)), Column("key", itemgetter(1), is_optional=True)]
    (empty,), (filled,) = fit_table(columns, [["a", ""]], 100), fit_table(columns, [["a", ""], ["b", "me"]], 100)
    assert not isinstance(empty, str) and [column.header for column in empty.columns] == ["id"]
    assert not isinstance(filled, str) and [column.header for column in filled.columns] == ["id", "key"]


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2J\u202eb\nc") == "a\ufffd[2J\ufffdb\nc"


def make_segment(number: int, parent: int | None, start: int, size: int = 100) -> SegmentRow:
    name = "" if parent is None else f"{parent:032x}"
    return SegmentRow(
        id=f"{number:032x}", parent=name, root=b"r" * 16, model="m", start=start, end=start + 100, bytes_on_disk=size
    )


def build_forest(rows: list[SegmentRow]) -> Forest:
    segments = {row.id: row for row in rows}
    usage = {row.id: FileUsage() for row in rows}
    return Forest.from_snapshot(
        IndexSnapshot(segments=segments, checkpoints={}, sessions={}, quarantined={}, usage=usage)
    )


def test_tree_of_10000_segments_is_bounded() -> None:
    """A chain that forks all along, which is as deep as can be, and thousands of small trees beside it."""
    rows = [make_segment(1, None, 0)]
    for number in range(3, 2 * CHAIN + 1, 2):
        rows += [
            make_segment(number - 1, number - 2, 50 * number),
            make_segment(number, number - 2, 50 * number, size=200),
        ]
    rows += [make_segment(number, None, 0, size=1) for number in range(10_000, 10_000 + 10_000 - len(rows))]
    view = tree_view.build_tree(build_forest(rows))
    assert sum(node["segments"] for node in view["nodes"]) == len(rows) == 10_000
    assert view["trees"][0]["bytes"] == sum(row.bytes_on_disk for row in rows)
    (tree,) = tree_view.render_tree(view, lines_max=50)
    assert not isinstance(tree, str)
    labels, waiting = [], [tree]
    while waiting:
        branch = waiting.pop()
        labels.append(str(branch.label))
        waiting += branch.children
    assert len(labels) <= 2 * (1 + 50) and sum("more branch" in label for label in labels) > 1
    assert any("4,001 more branches" in label for label in labels)
    shallow = tree_view.build_tree(build_forest(rows), depth_max=2)
    assert {node["depth"] for node in shallow["nodes"]} == {1, 2} and shallow["omitted"] > 0


def test_unbranched_segments_form_one_node() -> None:
    rows = [make_segment(1, None, 0), make_segment(2, 1, 100), make_segment(3, 2, 200), make_segment(4, 3, 250)]
    nodes = tree_view.build_tree(build_forest(rows))["nodes"]
    assert [(node["start"], node["end"], node["segments"]) for node in nodes] == [(0, 300, 3), (250, 350, 1)]
