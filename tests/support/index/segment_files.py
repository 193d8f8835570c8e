"""Segment files like the backend's, written without mlx."""

import json
from pathlib import Path

import msgspec

from warmline_common.storage.segment_file import FileMeta, header_checksum, read_header, tensor_checksum


def write_segment_file(path: Path, meta: FileMeta, tokens: bytes | None, tensors: dict[str, bytes]) -> int:
    """Write a segment file; its size."""
    parts = dict(tensors) if tokens is None else tensors | {"tokens": tokens}
    shapes = {name: ("U8", _shape(name, meta, data)) for name, data in parts.items()}
    sums = [tensor_checksum(name, *meta.span, [parts[name]]) for name in sorted(parts)]
    sums.append(header_checksum(meta, shapes))
    parts["checksums"] = b"".join(value.to_bytes(8, "little") for value in sums)
    shapes["checksums"] = ("U64", [len(sums)])
    header: dict[str, object] = {"__metadata__": {"warmline": meta.to_json()}}
    offset = 0
    for name, data in parts.items():
        dtype, shape = shapes[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.stem}.tmp")
    draft.touch(0o600)
    draft.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts.values()))
    draft.rename(path)  # complete or not there, as the backend's are
    return path.stat().st_size


def _shape(name: str, meta: FileMeta, data: bytes) -> list[int]:
    """Compute a tensor's shape; rows have one head, as wide as their bytes."""
    is_row = meta.kind == "segment" and name != "tokens"
    return [1, 1, meta.end - meta.start, len(data) // (meta.end - meta.start)] if is_row else [len(data)]


def rewrite_meta(path: Path, **changed: object) -> None:
    """Change a file's metadata, with a matching header checksum."""
    header = read_header(path)
    meta = msgspec.structs.replace(header.meta, **changed)
    data = path.read_bytes()
    parts = {name: data[at.offset : at.offset + at.bytes_count] for name, at in header.tensors.items()}
    tokens = parts.pop("tokens", None)
    del parts["checksums"]
    write_segment_file(path, meta, tokens, parts)
