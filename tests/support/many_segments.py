"""Index with thousands of segments, written in one transaction, with files that a start accepts."""

import hashlib

from warmline_common.protocol.tokens import chain_hashes, namespace, pack_tokens
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import SegmentRow, SessionRow
from warmline_proxy.store.tables import Tables, block_range

MODEL = "model-a"
SYSTEM_TOKENS, TURN_TOKENS = 128, 64
CHAIN = 10  # segments of a conversation after the part that all of a namespace share
NEWEST = 1_700_000_000.0  # Unix seconds, when the last of them was used


def fill_index(
    index: Index, segments: int, *, roots: int = 2, file_bytes: int = 256, clients: str = "client-{}"
) -> int:
    """Store about so many segments: conversations of CHAIN segments after a shared prefix; the number of conversations.

    Every third conversation has an older one that ends half way.  Files are as large as their rows say, and no more.
    """
    conversations = segments // CHAIN

    def change(tables: Tables) -> None:
        tables.mark_complete()
        for number in range(roots):
            _insert_path(tables, namespace(f"fingerprint {number}"), [_make_system_piece(number)], file_bytes)
        for number in range(conversations):
            _insert_conversation(tables, number, number % roots, file_bytes, clients)

    index.transact(change)
    for row in index.segments():
        path = index.home.segment_file(row.id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(0o600)
        with path.open("r+b") as file:
            file.truncate(row.bytes_on_disk)
    return conversations


def _insert_conversation(tables: Tables, number: int, at_root: int, file_bytes: int, clients: str) -> None:
    root = namespace(f"fingerprint {at_root}")
    turns = [_Piece(f"{number} {turn}", [number, *range(turn, turn + TURN_TOKENS - 1)]) for turn in range(CHAIN)]
    _insert_path(tables, root, [_make_system_piece(at_root), *turns], file_bytes + number % 9)
    ends = [SYSTEM_TOKENS + (turn + 1) * TURN_TOKENS for turn in range(CHAIN)]
    if number % 3 == 0:
        half = CHAIN // 2
        _put_session(
            tables, f"half {number}", root, turns[half].id, ends[half], number, clients.format(f"half-{number}")
        )
    _put_session(tables, f"whole {number}", root, turns[-1].id, ends[-1], number, clients.format(number))


class _Piece:
    """Name and tokens of a segment."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.id, self.tokens = _make_id(name), tokens


def _make_system_piece(number: int) -> _Piece:
    return _Piece(f"system {number}", list(range(SYSTEM_TOKENS)))


def _insert_path(tables: Tables, root: bytes, path: list[_Piece], size: int) -> None:
    """Insert the segments of a path that are not stored yet."""
    hashes = chain_hashes(root, pack_tokens([token for piece in path for token in piece.tokens]))
    start, parent = 0, ""
    for piece in path:
        end = start + len(piece.tokens)
        if tables.segment(piece.id) is None:
            row = SegmentRow(
                id=piece.id, parent=parent, root=root, model=MODEL, start=start, end=end, bytes_on_disk=size,
                created=NEWEST,
            )  # fmt: skip
            tables.insert_segment(row, pack_tokens(piece.tokens), hashes[block_range(start, end)])
        start, parent = end, piece.id


def _put_session(tables: Tables, name: str, root: bytes, leaf: str, tokens: int, number: int, client: str) -> None:
    row = SessionRow(
        id=_make_id(name)[:12],
        root=root,
        model=MODEL,
        leaf=leaf,
        tokens=tokens,
        turn_end=tokens,
        turn_digest=bytes(16),
        turn_segment=leaf,
        created=NEWEST - 5000,
        last_used=NEWEST - number,
        client=client,
    )
    tables.put_session(row)


def _make_id(name: str) -> str:
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
