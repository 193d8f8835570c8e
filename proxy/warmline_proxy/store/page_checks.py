"""Pages of an LMDB file, checked without LMDB: that maps them, and ends the process that meets a damaged one.

The format is LMDB's 0.9 (`mdb.c`): two meta pages, of which the one with the newer transaction counts; trees of branch
and leaf pages; overflow pages for large values.  The first tree has the free pages by transaction, the second one the
roots of the named tables.  Content of entries is not looked at: that is `row_checks`' part.
"""

import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from warmline_common.storage import disk

MAGIC, VERSION = 0xBEEFC0DE, 1
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8  # flags of pages
BIG, TABLE = 1, 2  # flags of nodes: a value in overflow pages, the record of a table
NO_PAGE = (1 << 64) - 1  # root of an empty tree
INTEGER_KEYS = 8  # flag of the tree of free pages
PAGE_BYTES_MIN, PAGE_BYTES_MAX = 512, 1 << 16
MAP_BYTES_MAX = 1 << 46  # of address space; with more, nothing could be mapped
FREE_PAGES = "the free pages"
DEPTH_MAX = 32  # of LMDB's cursors
CHANGES_MAX = 10  # how often a file that is being written is read again
READ_BYTES = 1 << 20

PAGE_HEADER = Struct("=QHHHH")  # number, padding, flags, end of the node offsets, begin of the nodes
OVERFLOW_COUNT = Struct("=I")  # in place of the last two
META_HEADER = Struct("=IIQQ")  # magic, version, address, bytes of the map
TREE_RECORD = Struct("=IHHQQQQQ")
META_END = Struct("=QQ")  # last page, transaction
OFFSET = Struct("=H")
NODE_HEADER = Struct("=HHHH")  # value's size in two halves, flags, key's size; of a branch, page number in the first 3
NUMBER = Struct("=Q")
META_BYTES = META_HEADER.size + 2 * TREE_RECORD.size + META_END.size


class _PageFlawError(Exception):
    """The file is damaged: where, and how."""


class _TreeRecord(NamedTuple):
    padding: int  # of the first tree: the size of a page
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Meta(NamedTuple):
    map_bytes: int
    free: _TreeRecord
    main: _TreeRecord
    last_page: int
    transaction: int


class _Node(NamedTuple):
    key: bytes
    flags: int
    page: int  # of a branch: the page below; of a big value: its first page; else 0
    value_bytes: int
    value: bytes  # b"" of a branch, and of a big value


def find_page_flaw(file: Path, *, tables_only: bool = False) -> str:
    """Flaw of a data file, with which LMDB could not open, read or write it; "" where there is none.

    `tables_only`: what opening reads, as fast as that; all where the file ends before its last page.  Another process
    may write the file meanwhile.  Never raises.
    """
    flaw = ""
    for _ in range(CHANGES_MAX):
        try:
            with disk.open_to_read(file) as opened:
                check = _PageCheck(opened.fileno())
                try:
                    check.run(tables_only)
                    return ""
                except _PageFlawError as error:
                    flaw = str(error)
                if not check.is_outdated():
                    break
        except OSError as error:
            return str(error)
    return flaw


class _PageCheck:
    """Check of the pages of one snapshot: all that are used, once each, and the list of those that are free."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._page_bytes = PAGE_BYTES_MIN
        self._metas: tuple[bytes, ...] = ()
        self._last_page = 0
        self._seen = bytearray()  # by page: 1 where it is used, or free

    def run(self, tables_only: bool) -> None:
        """Raises _PageFlawError, OSError."""
        meta = self._read_newest_meta()
        self._last_page, self._seen = meta.last_page, bytearray(meta.last_page + 1)
        self._seen[:2] = b"\1\1"
        tables = [(node.key.decode(errors="replace"), self._read_table(node)) for node in self._walk("main", meta.main)]
        if tables_only and self._count_pages() > self._last_page:  # LMDB need not write last pages that became free
            for name, record in tables:
                _require(record.root == NO_PAGE or record.root <= self._last_page, f"table {name} has no root")
            return
        for name, record in tables:
            for node in self._walk(name, record):
                _require(not node.flags & TABLE, f"table {name} has a table in it")
        for node in self._walk(FREE_PAGES, meta.free, has_integer_keys=True):
            self._mark_free_pages(node, meta.transaction)
        _require(self._seen[-1] != 0, f"the last page, {self._last_page}, is neither used nor free")

    def is_outdated(self) -> bool:
        """True where a transaction was committed since the metas were read."""
        return self._metas != self._read_metas()

    # --- metas ---

    def _read_metas(self) -> tuple[bytes, ...]:
        parts = (os.pread(self._descriptor, PAGE_HEADER.size + META_BYTES, at) for at in (0, self._page_bytes))
        return tuple(parts)

    def _read_newest_meta(self) -> _Meta:
        first = _parse_meta(os.pread(self._descriptor, PAGE_HEADER.size + META_BYTES, 0), 0)
        size = self._page_bytes = first.free.padding
        _require(PAGE_BYTES_MIN <= size <= PAGE_BYTES_MAX and not size & size - 1, f"it has pages of {size} bytes")
        self._metas = self._read_metas()
        metas = [_parse_meta(page, number) for number, page in enumerate(self._metas)]
        older, newest = sorted(metas, key=lambda meta: meta.transaction)
        _require(older.free.padding == newest.free.padding, "its metas have pages of two sizes")
        # Each commit overwrites the older one: the even transactions' lies in page 0.
        is_fresh = older.transaction == newest.transaction == 0
        is_turn = newest is metas[newest.transaction & 1] and newest.transaction - older.transaction == 1
        _require(is_fresh or is_turn, "its metas are not of two successive transactions")
        _require(1 <= newest.last_page < newest.map_bytes // size, f"it has {newest.last_page} pages")
        _require(newest.map_bytes <= MAP_BYTES_MAX, f"it has a map of {newest.map_bytes} bytes")
        _require(newest.last_page <= self._count_pages() + (1 << 20), "its last page is far off")
        return newest

    def _count_pages(self) -> int:
        """Whole pages that the file has now."""
        return os.fstat(self._descriptor).st_size // self._page_bytes

    # --- trees ---

    def _walk(self, name: str, tree: _TreeRecord, *, has_integer_keys: bool = False) -> Iterator[_Node]:
        """The nodes of a tree's leaves in order, with all its pages checked."""
        _require(tree.flags == (INTEGER_KEYS if has_integer_keys else 0), f"{name} has flags {tree.flags}")
        counts = {BRANCH: 0, LEAF: 0, OVERFLOW: 0}
        entries, previous = 0, b""
        for node, low, high in self._walk_page(name, tree.root, tree.depth, counts) if tree.root != NO_PAGE else ():
            key = node.key
            if has_integer_keys:  # as numbers: little-endian ones are in order from their ends
                key, low, high = key[::-1], low[::-1], high[::-1]
                _require(len(key) == NUMBER.size, f"{name} have a key of {len(key)} bytes")
            if entries and previous >= key:
                raise _PageFlawError(f"{name} is not in order")
            if key < low or (high and key >= high):
                raise _PageFlawError(f"{name} has a key in a wrong page")
            entries, previous = entries + 1, key
            if node.flags & BIG:
                counts[OVERFLOW] += self._mark_overflow(name, node)
            yield node
        found = (counts[BRANCH], counts[LEAF], counts[OVERFLOW], entries)
        _require(found == tree[3:7], f"{name} has other pages or entries than its record says")
        _require(tree.root != NO_PAGE or not tree.depth, f"{name} has depth {tree.depth} and no root")

    def _walk_page(
        self, name: str, number: int, depth: int, counts: dict[int, int], low: bytes = b"", high: bytes = b""
    ) -> Iterator[tuple[_Node, bytes, bytes]]:
        """The nodes below a page, each with the bounds of its key; `depth`: 1 for a leaf."""
        _require(1 <= depth <= DEPTH_MAX, f"{name} has depth {depth}")
        kind = BRANCH if depth > 1 else LEAF
        counts[kind] += 1
        nodes = self._read_nodes(name, number, kind)
        if kind == LEAF:
            for node in nodes:
                yield node, low, high
            return
        keys = [low, *(node.key for node in nodes[1:]), high]  # the first key of a branch means nothing
        for node, (begin, end) in zip(nodes, pairwise(keys), strict=True):
            yield from self._walk_page(name, node.page, depth - 1, counts, begin, end)

    def _read_nodes(self, name: str, number: int, kind: int) -> list[_Node]:
        self._mark(name, number, 1)
        page = os.pread(self._descriptor, self._page_bytes, number * self._page_bytes)
        where = f"page {number}, of {name},"
        _require(len(page) == self._page_bytes, f"{where} is beyond the end of the file")
        own, _, flags, offsets_end, begin = PAGE_HEADER.unpack_from(page)
        _require((own, flags) == (number, kind), f"{where} is page {own} of kind {flags}")
        is_sound = PAGE_HEADER.size < offsets_end <= begin <= len(page) and not offsets_end % 2
        _require(is_sound, f"{where} has no nodes")
        nodes, spans = [], []
        for (at,) in OFFSET.iter_unpack(page[PAGE_HEADER.size : offsets_end]):
            if not begin <= at <= len(page) - NODE_HEADER.size:
                raise _PageFlawError(f"{where} has a node outside")
            node, end = _parse_node(page, at, kind)
            nodes.append(node)
            spans.append((at, end + end % 2))
        for at, end in sorted(spans):  # LMDB leaves no gap between nodes
            if at != begin:
                raise _PageFlawError(f"{where} has nodes that overlap, or a gap between them")
            begin = end
        _require(begin == len(page), f"{where} has a node that is too long or too short")
        is_tree = kind == LEAF or len(nodes) > 1 or name == FREE_PAGES  # where LMDB allows one
        _require(is_tree, f"{where} has one branch")
        return nodes

    def _read_table(self, node: _Node) -> _TreeRecord:
        name = node.key.decode(errors="replace")
        _require(node.flags == TABLE and node.value_bytes == TREE_RECORD.size, f"{name} is no table")
        return _TreeRecord(*TREE_RECORD.unpack(self._read_value(node)))

    # --- values ---

    def _mark_overflow(self, name: str, node: _Node) -> int:
        """Mark the overflow pages of a value, and read them; their count."""
        where = f"page {node.page}, of {name},"
        _require(node.page <= self._last_page, f"{where} is beyond the last page")
        at = node.page * self._page_bytes
        header = os.pread(self._descriptor, PAGE_HEADER.size, at)
        _require(len(header) == PAGE_HEADER.size, f"{where} is beyond the end of the file")
        own, _, flags, _, _ = PAGE_HEADER.unpack(header)
        count: int
        (count,) = OVERFLOW_COUNT.unpack_from(header, PAGE_HEADER.size - OVERFLOW_COUNT.size)
        _require((own, flags) == (node.page, OVERFLOW), f"{where} is page {own} of kind {flags}")
        has_room = PAGE_HEADER.size + node.value_bytes <= count * self._page_bytes
        _require(has_room, f"{where} has a value that is too long")
        self._mark(name, node.page, count)
        for begin in range(0, count * self._page_bytes, READ_BYTES):  # a part that can't be read is found here
            wanted = min(READ_BYTES, count * self._page_bytes - begin)
            is_read = len(os.pread(self._descriptor, wanted, at + begin)) == wanted
            _require(is_read, f"{where} goes beyond the end of the file")
        return count

    def _read_value(self, node: _Node) -> bytes:
        if not node.flags & BIG:
            return node.value
        return os.pread(self._descriptor, node.value_bytes, node.page * self._page_bytes + PAGE_HEADER.size)

    def _mark_free_pages(self, node: _Node, newest: int) -> None:
        (transaction,) = NUMBER.unpack(node.key)
        _require(transaction <= newest, f"pages are free since transaction {transaction}, and the newest is {newest}")
        value = self._read_value(node)
        _require(len(value) >= NUMBER.size and not len(value) % NUMBER.size, "a list of free pages is cut")
        count, *rest = Struct(f"={len(value) // NUMBER.size}Q").unpack(value)
        _require(count <= len(rest), f"a list of free pages has {len(rest)} of {count}")
        _require(all(first > second for first, second in pairwise(rest[:count])), "free pages are not in order")
        for page in rest[:count]:
            self._mark(FREE_PAGES, page, 1)

    def _mark(self, name: str, page: int, count: int) -> None:
        is_sound = page >= 2 and count >= 1 and page + count - 1 <= self._last_page
        _require(is_sound and not any(self._seen[page : page + count]), f"page {page}, of {name}, is used twice")
        self._seen[page : page + count] = b"\1" * count


def _parse_meta(page: bytes, number: int) -> _Meta:
    _require(len(page) >= PAGE_HEADER.size + META_BYTES, "it is too short")
    own, _, flags, _, _ = PAGE_HEADER.unpack_from(page)
    magic, version, _, map_bytes = META_HEADER.unpack_from(page, PAGE_HEADER.size)
    is_sound = (own, flags, magic, version) == (number, META, MAGIC, VERSION)
    _require(is_sound, f"meta page {number} is none of LMDB's")
    at = PAGE_HEADER.size + META_HEADER.size
    free, main = (_TreeRecord(*TREE_RECORD.unpack_from(page, at + index * TREE_RECORD.size)) for index in (0, 1))
    return _Meta(map_bytes, free, main, *META_END.unpack_from(page, at + 2 * TREE_RECORD.size))


def _parse_node(page: bytes, at: int, kind: int) -> tuple[_Node, int]:
    """A node, and where it ends, which may be beyond its page."""
    low, high, flags, key_bytes = NODE_HEADER.unpack_from(page, at)
    key_at = at + NODE_HEADER.size
    value_at = key_at + key_bytes
    key = page[key_at:value_at]
    if kind == BRANCH:
        return _Node(key, 0, low | high << 16 | flags << 32, 0, b""), value_at
    size = low | high << 16
    if flags not in (0, BIG, TABLE):
        raise _PageFlawError(f"a node has flags {flags}")
    if not flags & BIG:
        return _Node(key, flags, 0, size, page[value_at : value_at + size]), value_at + size
    end = value_at + NUMBER.size
    return _Node(key, flags, int.from_bytes(page[value_at:end], sys.byteorder), size, b""), end


def _require(is_sound: bool, flaw: str) -> None:
    if not is_sound:
        raise _PageFlawError(flaw)
