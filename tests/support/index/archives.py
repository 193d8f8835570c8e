"""Homes with files of distinguishable rows, and exports and imports of them."""

import io
from collections.abc import Sequence
from pathlib import Path

import xxhash

from support.index.indexes import LAYOUT, MODEL
from warmline_common.protocol.messages import SavedFile, SaveReply
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, pack_tokens, prefix_digest
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import (
    CHECKSUMS_TENSOR,
    TOKENS_TENSOR,
    FileMeta,
    encode_header,
    file_checksum,
    header_checksum,
    read_header,
    tensor_checksum,
)
from warmline_proxy.archive.exporter import Exporter
from warmline_proxy.archive.importer import ImportReply, KnownModels, import_archive
from warmline_proxy.archive.reader import read_archive
from warmline_proxy.index.index import Index
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.store.rows import SavePlan, SessionUpdate

FINGERPRINT = "0123456789abcdef" * 4
HEADS, WIDTH = 2, 3
ROWS, STATE = "0.kv.keys", "1.arrays.0"
KNOWN = KnownModels(fingerprints={FINGERPRINT}, description="this one")
TALK = list(range(1000, 1300))
STATES = [100, 200, 300]


def make_row(tokens: bytes, at: int, head: int) -> bytes:
    """Make the row that a model computes of the token there, after all tokens before it."""
    return xxhash.xxh3_64_digest(tokens[: (at + 1) * TOKEN_BYTES] + bytes([head]))[:WIDTH]


def make_state(tokens: bytes, position: int) -> bytes:
    return xxhash.xxh3_128_digest(tokens[: position * TOKEN_BYTES])


def make_rows(tokens: bytes, start: int, end: int) -> bytes:
    return b"".join(make_row(tokens, at, head) for head in range(HEADS) for at in range(start, end))


def save(
    index: Index,
    ids: Sequence[int],
    checkpoints: Sequence[int] = (),
    *,
    tenant: str = "",
    client: str = "",
    may_replace: bool = False,
) -> str:
    """Save a conversation that continues to these tokens; its session's id."""
    tokens, root = pack_tokens(ids), namespace(FINGERPRINT, tenant)
    plan = index.begin_save(SaveIntent(root, MODEL, tokens, LAYOUT, checkpoints, may_replace))
    assert plan is not None
    reply = SaveReply(boot="b", generation=0, segments=[], checkpoints=[], seconds=0.0)
    for spec in plan.segments:
        meta = _meta(plan, "segment", spec.id, spec.start, spec.end, parent=spec.parent)
        mine = {
            TOKENS_TENSOR: ("U32", (spec.end - spec.start,), tokens[spec.start * TOKEN_BYTES : spec.end * TOKEN_BYTES])
        }
        kv = {ROWS: ("U8", (1, HEADS, spec.end - spec.start, WIDTH), make_rows(tokens, spec.start, spec.end))}
        reply.segments.append(_write(index.home, meta, kv | mine))
    for ref in plan.checkpoints:
        meta = _meta(plan, "checkpoint", ref.id, ref.position, ref.position, position=ref.position)
        reply.checkpoints.append(_write(index.home, meta, {STATE: ("U8", (16,), make_state(tokens, ref.position))}))
    update = SessionUpdate(turn_end=len(ids) - 1, client=client)
    return index.commit_save(plan, reply, prefill_s=1.0, session=update).session


def save_conversations(index: Index, tenant: str = "") -> str:
    """Save a conversation in three segments with a branch in the last one; its session's id."""
    save(index, TALK[:120], [100], tenant=tenant, client="mine")
    save(index, TALK[:220], [100, 200], tenant=tenant, client="mine")
    session = save(index, TALK, STATES, tenant=tenant, client="mine")
    save(index, [*TALK[:250], 7, 8, 9], tenant=tenant, client="secret-other")
    return session


def _meta(plan: SavePlan, kind: str, file_id: str, start: int, end: int, **more: object) -> FileMeta:
    prefix = prefix_digest(plan.root, plan.tokens[: start * TOKEN_BYTES])
    fields = {"kind": kind, "id": file_id, "start": start, "end": end, "prefix": prefix, "model": plan.model, **more}
    return FileMeta(fingerprint=FINGERPRINT, root=plan.root.hex(), **fields)  # type: ignore[arg-type]


def _write(home: Home, meta: FileMeta, tensors: dict[str, tuple[str, Sequence[int], bytes]]) -> SavedFile:
    return write_file(home.segment_file(meta.id), meta, tensors)


def write_file(path: Path, meta: FileMeta, tensors: dict[str, tuple[str, Sequence[int], bytes]]) -> SavedFile:
    names = sorted(tensors)
    shapes = {name: tensors[name][:2] for name in names}
    sums = [tensor_checksum(name, *meta.span, [tensors[name][2]]) for name in names]
    sums.append(header_checksum(meta, shapes))
    head = encode_header(meta, shapes | {CHECKSUMS_TENSOR: ("U64", (len(sums),))})
    packed = b"".join(value.to_bytes(8, "little") for value in sums)
    size = disk.write_durable(path, [head, *(tensors[name][2] for name in names), packed])
    return SavedFile(id=meta.id, bytes_written=size, checksum=file_checksum(sums))


def export_session(index: Index, session: str) -> bytes:
    with Exporter(index, session) as export:
        data = b"".join(export.read_chunks())
        assert len(data) == export.bytes_count
    return data


def import_session(
    index: Index, data: bytes, tenant: str = "", known: KnownModels = KNOWN, anyway: bool = False
) -> ImportReply:
    return import_archive(index, read_archive(io.BytesIO(data)), tenant, known, anyway=anyway)


def check_content(index: Index, ids: Sequence[int], tenant: str = "", checkpoints: Sequence[int] = ()) -> None:
    """Check that these tokens are stored, each with its own rows, and so are these states."""
    tokens = pack_tokens(ids)
    match = index.match_prefix(namespace(FINGERPRINT, tenant), tokens, len(ids))
    assert match.tokens == len(ids), match.end_reason
    for link in match.chain:
        stored = read_tensor(index.home.segment_file(link.id), ROWS)
        length = link.end - link.start
        for head in range(HEADS):
            mine = stored[head * length * WIDTH :][: (link.upto - link.start) * WIDTH]
            assert mine == b"".join(make_row(tokens, at, head) for at in range(link.start, link.upto)), link
    for ref in match.checkpoints:
        assert read_tensor(index.home.segment_file(ref.id), STATE) == make_state(tokens, ref.position)
    assert [ref.position for ref in match.checkpoints] == list(checkpoints)


def read_tensor(path: Path, name: str) -> bytes:
    place = read_header(path).tensors[name]
    return path.read_bytes()[place.offset :][: place.bytes_count]


def list_files(home: Home) -> dict[str, int]:
    """List the files under a home, except the index's, with their sizes."""
    paths = (path for path in home.segments.rglob("*") if path.is_file())
    return {str(path.relative_to(home.root)): path.stat().st_size for path in paths}
