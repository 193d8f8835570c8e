"""What must hold of the index and its files, checked in one snapshot."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from warmline_proxy import index_files
from warmline_proxy.index_tables import Sums, Tables, blocks_within, first_token, slot
from warmline_proxy.rows import CheckpointRow, Finding, SegmentRow
from warmline_wire.home import Home
from warmline_wire.keys import BLOCK_TOKENS, TOKEN_BYTES, chain_hashes
from warmline_wire.segment_file import (
    SegmentFileError,
    SegmentHeader,
    file_checksum,
    read_checksums,
    read_header,
    read_tokens,
    verify_file,
)

Files = list[tuple[str, Path]]  # (id, path)


def listed(home: Home) -> tuple[Files, Files]:
    """The files in place and those set aside.  List them before the snapshot: what is saved later is then no orphan."""
    return list(index_files.stored(home)), list(index_files.aside(home))


FILE_FINDINGS = {"file", "missing", "truncated", "checksum", "foreign", "tokens", "io"}


def verify(tables: Tables, home: Home, files: tuple[Files, Files], deep: bool) -> list[Finding]:
    segments = {row.id: row for row in tables.segments()}
    found = [*_tree(tables, segments), *_blocks(tables, segments), *_checkpoints(tables, segments)]
    found += [
        *_sessions(tables, segments),
        *_sums(tables),
        *_files(tables, home, deep),
        *_orphans(tables, home, *files),
    ]
    return found


def _finding(what: str, file_id: str, detail: str) -> Finding:
    return Finding(what=what, id=file_id, detail=detail)


def _tree(tables: Tables, segments: dict[str, SegmentRow]) -> Iterator[Finding]:
    for row in segments.values():
        tokens = tables.tokens(row.id)
        if not row.start < row.end or len(tokens) != (row.end - row.start) * TOKEN_BYTES:
            yield _finding("tree", row.id, f"{len(tokens)} bytes of tokens for [{row.start}, {row.end})")
            continue
        if tables.child(row.root, row.parent, row.start, tokens[:TOKEN_BYTES]) != row.id:
            yield _finding("tree", row.id, "its parent does not name it")
        yield from _parent(tables, row, segments.get(row.parent))
    slots = {slot(r.root, r.parent, r.start, tables.tokens(r.id)[:TOKEN_BYTES]) for r in segments.values()}
    for key, value in tables.items("children"):
        if key not in slots:
            yield _finding("tree", value.hex(), "named as a child, but not stored")
    for table in ("tokens", "hashes"):
        for key, _ in tables.items(table):
            if key.hex() not in segments:
                yield _finding("tree", key.hex(), f"{table} without a row")


def _parent(tables: Tables, row: SegmentRow, parent: SegmentRow | None) -> Iterator[Finding]:
    if not row.parent:
        if row.start != 0:
            yield _finding("tree", row.id, f"starts at {row.start} without a parent")
    elif parent is None:
        yield _finding("tree", row.id, f"its parent {row.parent} is not stored")
    elif parent.root != row.root or not parent.start < row.start <= parent.end:
        yield _finding("tree", row.id, f"starts at {row.start}, its parent has [{parent.start}, {parent.end})")
    elif first_token(tables.tokens(parent.id), row.start - parent.start) == tables.tokens(row.id)[:TOKEN_BYTES]:
        yield _finding("tree", row.id, f"begins like the rest of its parent at {row.start}")


def _blocks(tables: Tables, segments: dict[str, SegmentRow]) -> Iterator[Finding]:
    expected: dict[bytes, str] = {}
    for row in segments.values():
        mine = tables.hashes(row.id)
        if mine != _hashes(tables, segments, row):
            yield _finding("block", row.id, "its chain hashes are not those of its tokens")
        expected |= dict.fromkeys(mine, row.id)
    actual = {key: value.hex() for key, value in tables.items("blocks")}
    for key in expected.keys() | actual.keys():
        if expected.get(key) != actual.get(key):
            owner = expected.get(key, "no segment")
            yield _finding("block", actual.get(key, ""), f"block {key.hex()} belongs to {owner}")


def _hashes(tables: Tables, segments: dict[str, SegmentRow], row: SegmentRow) -> list[bytes]:
    """What its chain hashes must be, given those of what it builds on; [] where a link is missing."""
    first = row.start - row.start % BLOCK_TOKENS  # where the block begins in which it starts
    tokens, link = tables.tokens(row.id), row
    while link.start > first:
        leaves_at, parent = link.start, segments.get(link.parent)
        if parent is None or parent.start >= leaves_at:
            return []
        begin = max(first, parent.start)
        tokens = tables.tokens(parent.id)[_bytes(begin - parent.start) : _bytes(leaves_at - parent.start)] + tokens
        link = parent
    while link.start >= first > 0:
        parent = segments.get(link.parent)
        if parent is None or parent.start >= link.start:
            return []
        link = parent
    before = row.root
    if first:
        at = first // BLOCK_TOKENS - 1 - blocks_within(link.start, link.end).start
        before = b"".join(tables.hashes(link.id)[at : at + 1])
    return list(chain_hashes(before, tokens))


def _bytes(tokens: int) -> int:
    return tokens * TOKEN_BYTES


def _checkpoints(tables: Tables, segments: dict[str, SegmentRow]) -> Iterator[Finding]:
    rows = tables.checkpoints()
    for row in rows:
        segment = segments.get(row.segment)
        if segment is None or not segment.start < row.position <= segment.end:
            yield _finding("checkpoint", row.id, f"at {row.position}, outside its segment {row.segment}")
        if tables.checkpoint_at(row.segment, row.position) != row.id:
            yield _finding("checkpoint", row.id, "its place does not name it")
    if tables.count("places") != len(rows):
        yield _finding("checkpoint", "", f"{tables.count('places')} places for {len(rows)} checkpoints")


def _sessions(tables: Tables, segments: dict[str, SegmentRow]) -> Iterator[Finding]:
    anchors = 0
    for row in tables.sessions():
        leaf = segments.get(row.leaf)
        if leaf is None or not leaf.start < row.tokens <= leaf.end:
            yield _finding("session", row.id, f"ends at {row.tokens}, outside its segment {row.leaf}")
        for anchor in {row.leaf, row.turn_segment} - {""}:
            anchors += 1
            if anchor not in segments or row.id not in {session.id for session in tables.anchored(anchor)}:
                yield _finding("session", row.id, f"is not anchored in {anchor}")
    if tables.count("anchors") != anchors:
        yield _finding("session", "", f"{tables.count('anchors')} anchors, {anchors} wanted")


def _sums(tables: Tables) -> Iterator[Finding]:
    segments, checkpoints, quarantined = list(tables.segments()), tables.checkpoints(), tables.quarantined()
    counted = Sums(
        segments=len(segments),
        checkpoints=len(checkpoints),
        sessions=tables.count("sessions"),
        quarantined=len(quarantined),
        tokens=sum(row.end - row.start for row in segments),
        bytes_segments=sum(row.bytes_on_disk for row in segments),
        bytes_checkpoints=sum(row.bytes_on_disk for row in checkpoints),
        bytes_quarantined=sum(row.bytes_on_disk for row in quarantined),
        bytes_writing=sum(plan.bytes_expected for plan in tables.saves()),
        bytes_doomed=sum(tables.doomed().values()),
    )
    kept = msgspec.structs.asdict(tables.sums())
    for name, value in msgspec.structs.asdict(counted).items():
        if kept[name] != value:
            yield _finding("sum", "", f"{name} is {value}, the index says {kept[name]}")


def _files(tables: Tables, home: Home, deep: bool) -> Iterator[Finding]:
    for row in tables.files():
        try:
            if detail := _against_file(tables, row, home, deep):
                yield _finding("file", row.id, detail)
        except SegmentFileError as error:
            yield _finding(error.reason, row.id, error.detail)


def _against_file(tables: Tables, row: SegmentRow | CheckpointRow, home: Home, deep: bool) -> str:
    """What the file says otherwise than the row; "" where they agree."""
    file = home.segment_file(row.id)
    header = read_header(file)
    if detail := _against_header(row, header):
        return detail
    if file_checksum(read_checksums(file)) != row.checksum:
        return "its checksums are not those of when it was saved"
    if isinstance(row, SegmentRow) and read_tokens(file) != tables.tokens(row.id):
        return "has other tokens than the index"
    if deep:
        verify_file(file)
    return ""


def _against_header(row: SegmentRow | CheckpointRow, header: SegmentHeader) -> str:
    meta = header.meta
    if header.file_bytes != row.bytes_on_disk:
        return f"has {header.file_bytes} bytes, {row.bytes_on_disk} were saved"
    if isinstance(row, SegmentRow):
        same = (meta.kind, meta.id, meta.start, meta.end) == ("segment", row.id, row.start, row.end)
    else:
        same = (meta.kind, meta.id, meta.position) == ("checkpoint", row.id, row.position)
    return "" if same else f"is {meta.kind} {meta.id} of [{meta.start}, {meta.end}), position {meta.position}"


def still_stored(tables: Tables, findings: Iterable[Finding]) -> list[Finding]:
    """Without those about files that were evicted while they were looked at."""
    return [finding for finding in findings if finding.what not in FILE_FINDINGS or tables.holds(finding.id)]


def _orphans(tables: Tables, home: Home, stored: Files, aside: Files) -> Iterator[Finding]:
    """Files that nobody accounts for; those being written, or about to be deleted, are accounted for."""
    plans = tables.saves()
    known = {file_id for plan in plans for file_id in plan.file_ids} | tables.doomed().keys()
    known |= {row.id for row in tables.files()}
    quarantined = {row.id for row in tables.quarantined()}
    for file_id, file in stored:
        # A quarantined file may still be on its way.  A temporary file is right only while something is being written.
        right = file_id in known or file_id in quarantined if file_id else bool(plans)
        if not right and file.exists():
            yield _finding("orphan", file_id, str(file.relative_to(home.root)))
    for file_id, file in aside:
        if file_id not in quarantined | known and file.exists():
            yield _finding("orphan", file_id, str(file.relative_to(home.root)))
