"""Verification of the index and its files, in one snapshot."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from warmline_common.protocol.tokens import TOKEN_BYTES, PrefixHash
from warmline_common.storage.file_lock import find_lock_holder
from warmline_common.storage.home import Home
from warmline_proxy.index.reader import IndexReader
from warmline_proxy.index.recovery.file_headers import InvalidFile, ValidFile, inspect_file
from warmline_proxy.index.recovery.stored_responses import check_responses
from warmline_proxy.index.responses import count_bytes, list_responses
from warmline_proxy.index.turns import call_keys, list_turns
from warmline_proxy.store import files as stored_files
from warmline_proxy.store.row_checks import find_flaws
from warmline_proxy.store.rows import CheckpointRow, IndexFinding, SegmentRow, SessionRow, Sums
from warmline_proxy.store.tables import Tables, encode_child_key, token_at

COMPACTION_S_MAX = 600.0
FILE_FINDINGS = {"file", "place", "missing", "truncated", "checksum", "foreign", "tokens", "io"}


@dataclass(frozen=True)
class _DiskListing:
    """Listing of the disk, made before the snapshot: a file saved later is then no orphan."""

    stored: list[tuple[str, Path]]  # (id, path) of the files in their places
    quarantined: list[tuple[str, Path]]
    index: list[Path]  # generations of the index and their drafts


def verify_index(
    reader: IndexReader, deep: bool = False, progress: Callable[[int], object] = lambda _: None
) -> list[IndexFinding]:
    """Every structural invariant, and every file's header, tokens and place; `deep` reads all their bytes.

    Where an entry can't be read, only that is reported.  `progress` gets each file's bytes once that file is checked.
    Any thread; takes no lock.
    """
    home = reader.home
    stored, quarantined = list(stored_files.list_stored(home)), list(stored_files.list_quarantined(home))
    listing = _DiskListing(stored, quarantined, list(home.index.iterdir()))
    with reader.read_transaction() as tables:
        findings = list(find_flaws(tables)) or _check_all(tables, home, listing, deep, progress)
        if not findings and tables.has_true_digest() is False:
            findings = [_finding("digest", "", "an entry is another one than was written, which no other one tells")]
    with reader.read_transaction() as tables:
        return [finding for finding in findings if _is_current(tables, finding)]


def find_table_damage(tables: Tables) -> list[IndexFinding]:
    """Entries that can't be read; where there are none, contradictions between tables.  No file is read."""
    return list(find_flaws(tables)) or list(_check_tables(tables, _StoredTree.from_tables(tables)))


def _check_all(
    tables: Tables, home: Home, listing: _DiskListing, deep: bool, progress: Callable[[int], object]
) -> list[IndexFinding]:
    tree = _StoredTree.from_tables(tables)
    return [
        *_check_tables(tables, tree),
        *check_responses(tables, deep),
        *_check_files(tables, tree, home, deep, progress),
        *_check_quarantine(tables, home),
        *_check_orphans(tables, home, listing),
        *_check_permissions(home),
    ]


def _check_tables(tables: Tables, tree: "_StoredTree") -> Iterator[IndexFinding]:
    yield from _check_segments(tables, tree)
    yield from _check_children(tables, tree)
    yield from _check_blocks(tables, tree)
    yield from _check_checkpoints(tables, tree)
    yield from _check_sessions(tables, tree)
    yield from _check_usage(tables, tree)
    yield from _check_turns(tables)
    yield from _check_file_states(tables)
    yield from _check_sums(tables)


def _is_current(tables: Tables, finding: IndexFinding) -> bool:
    """False for a file that was evicted, or purged from quarantine, during the checks."""
    if finding.what in FILE_FINDINGS:
        return tables.has_file(finding.id)
    return finding.what != "quarantine" or tables.is_quarantined(finding.id)


@dataclass(frozen=True)
class _StoredTree:
    """The segments, and the prefixes before those whose path to the root is whole."""

    segments: dict[str, SegmentRow]
    prefixes: dict[str, PrefixHash]

    @classmethod
    def from_tables(cls, tables: Tables) -> "_StoredTree":
        segments = {row.id: row for row in tables.segments()}
        tree = cls(segments, {})
        for row in sorted(segments.values(), key=lambda row: row.start):  # parents start before their children
            if not row.parent and row.start == 0:
                tree.prefixes[row.id] = PrefixHash(row.root)
            elif row.parent in tree.prefixes and _is_child_of(row, segments[row.parent]):
                tree.prefixes[row.id] = tree.prefix_at(tables, row.parent, row.start)
        return tree

    def prefix_at(self, tables: Tables, segment_id: str, position: int) -> PrefixHash:
        """All tokens of this segment's path before `position`, which lies in it."""
        row = self.segments[segment_id]
        return self.prefixes[segment_id].extend(tables.tokens(segment_id)[: (position - row.start) * TOKEN_BYTES])

    def is_on_path(self, ancestor: str, segment_id: str) -> bool:
        while segment_id in self.prefixes and segment_id != ancestor:
            segment_id = self.segments[segment_id].parent
        return segment_id == ancestor


def _is_child_of(row: SegmentRow, parent: SegmentRow) -> bool:
    return parent.root == row.root and parent.start < row.start <= parent.end


def _finding(what: str, file_id: str, detail: str) -> IndexFinding:
    return IndexFinding(what=what, id=file_id, detail=detail)


# --- the tree ---


def _check_segments(tables: Tables, tree: _StoredTree) -> Iterator[IndexFinding]:
    for row in tree.segments.values():
        tokens = tables.tokens(row.id)
        if len(tokens) != (row.end - row.start) * TOKEN_BYTES:
            yield _finding("tree", row.id, f"{len(tokens)} bytes of tokens for [{row.start}, {row.end})")
            continue
        if tables.child(row.root, row.parent, row.start, tokens[:TOKEN_BYTES]) != row.id:
            yield _finding("tree", row.id, "its parent does not name it")
        yield from _check_parent(tables, row, tree.segments.get(row.parent))


def _check_parent(tables: Tables, row: SegmentRow, parent: SegmentRow | None) -> Iterator[IndexFinding]:
    if not row.parent:
        if row.start != 0:
            yield _finding("tree", row.id, f"starts at {row.start} without a parent")
    elif parent is None:
        yield _finding("tree", row.id, f"its parent {row.parent} is not stored")
    elif not _is_child_of(row, parent):
        yield _finding("tree", row.id, f"starts at {row.start}, its parent has [{parent.start}, {parent.end})")
    elif token_at(tables.tokens(parent.id), row.start - parent.start) == tables.tokens(row.id)[:TOKEN_BYTES]:
        yield _finding("tree", row.id, f"begins like the rest of its parent at {row.start}")


def _check_children(tables: Tables, tree: _StoredTree) -> Iterator[IndexFinding]:
    """Entries under a segment's id, or a parent's, belong to a stored segment."""
    rows = tree.segments.values()
    child_keys = {encode_child_key(r.root, r.parent, r.start, tables.tokens(r.id)[:TOKEN_BYTES]) for r in rows}
    for key, value in tables.items("children"):
        if key not in child_keys:
            yield _finding("tree", value.hex(), "named as a child, but not stored")
    for table in ("tokens", "hashes"):
        for key, _ in tables.items(table):
            if key.hex() not in tree.segments:
                yield _finding("tree", key.hex(), f"{table} without a row")
    for key, value in tables.items("gone"):
        if key in child_keys:
            yield _finding("tree", "", f"has a reason of removal ({value.decode()}), but is stored")
        elif key.startswith(b"s") and key[1:17].hex() not in tree.segments:
            yield _finding("tree", key[1:17].hex(), "has reasons of removal of its children, but is not stored")


def _check_blocks(tables: Tables, tree: _StoredTree) -> Iterator[IndexFinding]:
    expected: dict[bytes, str] = {}
    for row in tree.segments.values():
        hashes, before = tables.hashes(row.id), tree.prefixes.get(row.id)
        if before is None or hashes != before.extend_with_hashes(tables.tokens(row.id))[1]:
            yield _finding("block", row.id, "its chain hashes are not those of its tokens")
        expected |= dict.fromkeys(hashes, row.id)
    actual = {key: value.hex() for key, value in tables.items("blocks")}
    for key in expected.keys() | actual.keys():
        if expected.get(key) != actual.get(key):
            owner = expected.get(key, "no segment")
            yield _finding("block", actual.get(key, ""), f"block {key.hex()} belongs to {owner}")


def _check_checkpoints(tables: Tables, tree: _StoredTree) -> Iterator[IndexFinding]:
    rows = tables.checkpoints()
    for row in rows:
        segment = tree.segments.get(row.segment)
        if segment is None or not segment.start < row.position <= segment.end:
            yield _finding("checkpoint", row.id, f"at {row.position}, outside its segment {row.segment}")
        if tables.checkpoint_at(row.segment, row.position) != row.id:
            yield _finding("checkpoint", row.id, "its place does not name it")
    if tables.count("places") != len(rows):
        yield _finding("checkpoint", "", f"{tables.count('places')} places for {len(rows)} checkpoints")


# --- conversations ---


def _check_sessions(tables: Tables, tree: _StoredTree) -> Iterator[IndexFinding]:
    expected = set()
    for row in tables.sessions():
        leaf = tree.segments.get(row.leaf)
        if leaf is None or leaf.root != row.root or not leaf.start < row.tokens <= leaf.end:
            yield _finding("session", row.id, f"ends at {row.tokens}, outside its segment {row.leaf}")
        elif detail := _find_turn_end_error(tables, tree, row):
            yield _finding("session", row.id, detail)
        expected |= {(anchor, row.id) for anchor in {row.leaf, row.turn_segment} - {""}}
    anchors = {(key[:16].hex(), key[16:].decode(errors="replace")) for key, _ in tables.items("anchors")}
    for anchor, session in expected - anchors:
        yield _finding("session", session, f"is not anchored in {anchor}")
    for anchor, session in anchors - expected:
        yield _finding("session", session, f"is anchored in {anchor}, where it does not end")


def _find_turn_end_error(tables: Tables, tree: _StoredTree, row: SessionRow) -> str:
    """Error in the end of a session's last turn; "" where there is none."""
    if not row.turn_segment:
        return f"its turn ends at {row.turn_end}, in no segment" if row.turn_end <= row.tokens else ""
    segment = tree.segments.get(row.turn_segment)
    if segment is None or not segment.start < row.turn_end <= min(segment.end, row.tokens):
        return f"its turn ends at {row.turn_end}, outside segment {row.turn_segment}"
    if row.turn_segment not in tree.prefixes:
        return ""  # the tree is broken there: a finding of its segments
    if not tree.is_on_path(row.turn_segment, row.leaf):
        return f"its turn ends in {row.turn_segment}, which is not on its path"
    if tree.prefix_at(tables, row.turn_segment, row.turn_end).tokens_digest != row.turn_digest:
        return f"its first {row.turn_end} tokens are others"
    return ""


# --- bookkeeping ---


def _check_usage(tables: Tables, tree: _StoredTree) -> Iterator[IndexFinding]:
    stored = tree.segments.keys() | {row.id for row in tables.checkpoints()}
    for key, _ in tables.items("usage"):
        if key.hex() not in stored:
            yield _finding("usage", key.hex(), "counted, but not stored")


def _check_turns(tables: Tables) -> Iterator[IndexFinding]:
    """Each turn, and nothing else, is found under its calls."""
    expected: dict[bytes, bytes] = {}
    for key, row in list_turns(tables):
        for call, call_id in zip(call_keys(row), row.calls, strict=True):
            if expected.setdefault(call, key) != key:
                yield _finding("turn", call_id, "is in two turns")
    actual = dict(tables.items("calls"))
    for call in expected.keys() | actual.keys():
        if expected.get(call) != actual.get(call):
            yield _finding("turn", f"call_{call[16:].hex()}", "is not found under its turn")


def _check_file_states(tables: Tables) -> Iterator[IndexFinding]:
    """A file is either stored, or being written, or quarantined, or about to be deleted."""
    seen: dict[str, str] = {}
    states = {
        "stored": [row.id for row in tables.files()],
        "being written": [file_id for plan in tables.save_plans() for file_id in plan.file_ids],
        "quarantined": [row.id for row in tables.quarantined()],
        "about to be deleted": list(tables.pending_deletions()),
    }
    for state, ids in states.items():
        for file_id in ids:
            if file_id in seen:
                yield _finding("standing", file_id, f"both {seen[file_id]} and {state}")
            seen[file_id] = state


def _check_sums(tables: Tables) -> Iterator[IndexFinding]:
    segments, checkpoints, quarantined = list(tables.segments()), tables.checkpoints(), tables.quarantined()
    turns = [row for _, row in list_turns(tables)]
    responses = [row for _, row in list_responses(tables)]
    expected = Sums(
        segments=len(segments),
        checkpoints=len(checkpoints),
        sessions=tables.count("sessions"),
        quarantined=len(quarantined),
        tokens=sum(row.end - row.start for row in segments),
        bytes_segments=sum(row.bytes_on_disk for row in segments),
        bytes_checkpoints=sum(row.bytes_on_disk for row in checkpoints),
        bytes_quarantined=sum(row.bytes_on_disk for row in quarantined),
        bytes_writing=sum(plan.bytes_expected for plan in tables.save_plans()),
        bytes_doomed=sum(tables.pending_deletions().values()),
        turns=len(turns),
        bytes_turns=sum(len(row.tokens) for row in turns),
        responses=len(responses),
        bytes_responses=sum(map(count_bytes, responses)),
    )
    actual = msgspec.structs.asdict(tables.sums())
    for name, value in msgspec.structs.asdict(expected).items():
        if actual[name] != value:
            yield _finding("sum", "", f"{name} is {value}, the index says {actual[name]}")


# --- files ---


def _check_files(
    tables: Tables, tree: _StoredTree, home: Home, deep: bool, progress: Callable[[int], object]
) -> Iterator[IndexFinding]:
    for row in tables.files():
        file = inspect_file(home, row.id, deep=deep)
        if isinstance(file, InvalidFile):
            yield _finding(file.reason, row.id, file.detail)
        elif detail := _find_row_mismatch(tables, row, file):
            yield _finding("file", row.id, detail)
        elif detail := _find_place_mismatch(tables, tree, row, file):
            yield _finding("place", row.id, detail)
        progress(row.bytes_on_disk)


def _find_row_mismatch(tables: Tables, row: SegmentRow | CheckpointRow, file: ValidFile) -> str:
    """Difference between a row and its file's header; "" where they agree.

    The parent is excluded: another one with the same tokens may have taken its place (see `_find_place_mismatch`).
    """
    meta = file.meta
    if file.bytes_on_disk != row.bytes_on_disk:
        return f"has {file.bytes_on_disk} bytes, {row.bytes_on_disk} were saved"
    if isinstance(row, SegmentRow):
        is_same = (meta.kind, meta.start, meta.end) == ("segment", row.start, row.end)
    else:
        is_same = (meta.kind, meta.position) == ("checkpoint", row.position)
    if not is_same:
        return f"is a {meta.kind} of [{meta.start}, {meta.end}), position {meta.position}"
    if file.checksum != row.checksum:
        return "its checksums are not those of when it was saved"
    if isinstance(row, SegmentRow) and file.tokens != tables.tokens(row.id):
        return "has other tokens than the index"
    return ""


def _find_place_mismatch(tables: Tables, tree: _StoredTree, row: SegmentRow | CheckpointRow, file: ValidFile) -> str:
    """Error where a file's content was not computed after the tokens that the index has before it."""
    segment_id = row.id if isinstance(row, SegmentRow) else row.segment
    if segment_id not in tree.prefixes:
        return ""  # the tree is broken there: a finding of its segments
    position = row.start if isinstance(row, SegmentRow) else row.position
    if file.root != tree.segments[segment_id].root:
        return "belongs to another model or tenant"
    if file.meta.prefix != tree.prefix_at(tables, segment_id, position).digest:
        return "was computed after other tokens than the index has before it"
    return ""


def _check_quarantine(tables: Tables, home: Home) -> Iterator[IndexFinding]:
    for row in tables.quarantined():
        size = stored_files.read_quarantined_size(home, row.id)
        if size is None:
            yield _finding("quarantine", row.id, "its file is gone")
        elif size != row.bytes_on_disk:
            yield _finding("quarantine", row.id, f"has {size} bytes, the index says {row.bytes_on_disk}")


def _check_orphans(tables: Tables, home: Home, listing: _DiskListing) -> Iterator[IndexFinding]:
    """Files that are not stored, being written, quarantined or about to be deleted."""
    plans = tables.save_plans()
    ids = {file_id for plan in plans for file_id in plan.file_ids} | tables.pending_deletions().keys()
    ids |= {row.id for row in (*tables.files(), *tables.quarantined())}
    orphans = [
        # A quarantined file may still be on its way.  A temporary file is right only while something is being written.
        *((i, path) for i, path in listing.stored if not (i in ids if i else plans)),
        *((i, path) for i, path in listing.quarantined if i not in ids),
        *(("", path) for path in stored_files.find_superseded(listing.index) if not _may_be_compacting(home, path)),
    ]
    for file_id, path in orphans:
        if path.exists():
            yield _finding("orphan", file_id, str(path.relative_to(home.root)))


def _may_be_compacting(home: Home, path: Path) -> bool:
    """True where the process with the home's lock may be writing, or deleting, this generation of the index now."""
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return True
    return age_s < COMPACTION_S_MAX and bool(find_lock_holder(home.lock))


def _check_permissions(home: Home) -> Iterator[IndexFinding]:
    """Files with KV are as private as the transcript."""
    for path, mode in stored_files.find_non_private(home):
        yield _finding("mode", "", f"{path.relative_to(home.root)} is {mode:o}, open to others than its owner")
