"""Format of a segment or checkpoint file: a safetensors header, a place in a conversation, a checksum a tensor.

Read without mlx, so that the index's owner can check what the backend wrote.

    __metadata__["warmline"]  a JSON `FileMeta`
    "tokens"                  U8 or U32: the u32le ids of [start, end); segments only
    "checksums"               U64: `tensor_checksum` of every other tensor ("tokens" too), in the order of
                              their names, and last `header_checksum`
    layer.component.field     everything else

Tensors of bfloat16 may be coded (`segment_coding`): stored as U8, in fewer bytes, with a field "decoded" of coding,
dtype and shape.  Checksums are those of the decoded tensors.  A file with coded tensors has a format of its own.

Errors: SegmentFileError, whose `reason` is a word of RestoreRefusal.reason.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from sys import byteorder
from typing import BinaryIO, Literal

import msgspec
import xxhash

from warmline_common.protocol.messages import SEGMENT_FORMAT, decode
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_common.storage import disk

METADATA_KEY = "warmline"
TOKENS_TENSOR = "tokens"
CHECKSUMS_TENSOR = "checksums"
HEADER_BYTES_MAX = 16 << 20
HEADER_ALIGN = 8
READ_CHUNK_BYTES = 4 << 20
DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4}
DTYPE_BYTES |= {"U64": 8, "I64": 8, "F64": 8, "C64": 8}
CODED_SEGMENT_FORMAT = 3
CODING = "zstd-upper-bytes"
CODED_DTYPE = "BF16"
CODING_RATIO_MAX = 2  # decoded bytes of a stored one: lower bytes are stored as they are
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the last: brackets within brackets


class SegmentFileError(Exception):
    """File that must not be served.  `reason`: "missing", "truncated", "checksum", "foreign", "tokens" or "io"."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class FileMeta(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Identity of a file: a segment with the rows of [start, end), or a checkpoint at `position`.

    `prefix` proves its place: a digest of all tokens before it, since rows and states are valid only after these.
    `parent` is the segment that it was written on; another one, with the same tokens, may have taken its place since.
    """

    format: int = SEGMENT_FORMAT
    kind: Literal["segment", "checkpoint"]
    id: str
    fingerprint: str
    root: str  # namespace(fingerprint, tenant), in hex
    prefix: str  # keys.prefix_digest of the root and tokens [0, start), of a checkpoint [0, position)
    start: int
    end: int
    position: int = 0
    parent: str = ""
    model: str = ""  # served model's name, for people

    @property
    def span(self) -> tuple[int, int]:
        """(start, end) that every tensor's checksum includes."""
        return (self.start, self.end) if self.kind == "segment" else (self.position, self.position)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    def with_coding(self, is_coded: bool) -> "FileMeta":
        """The same identity of a file whose tensors are coded, or not."""
        return msgspec.structs.replace(self, format=CODED_SEGMENT_FORMAT if is_coded else SEGMENT_FORMAT)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor and the location of its bytes: `offset` counts from the file's first byte.

    `dtype`, `shape` and `bytes_count` are those of the decoded tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    stored_bytes: int
    is_coded: bool = False

    @property
    def bytes_count(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class SegmentHeader:
    meta: FileMeta
    tensors: dict[str, TensorInfo]  # "checksums" included
    file_bytes: int

    @property
    def is_coded(self) -> bool:
        return self.meta.format == CODED_SEGMENT_FORMAT

    @property
    def decoded_bytes(self) -> int:
        """Size of the file if no tensor were coded."""
        return self.file_bytes + sum(place.bytes_count - place.stored_bytes for place in self.tensors.values())

    def select_kv_tensors(self) -> dict[str, TensorInfo]:
        """Tensors that are KV."""
        return {name: place for name, place in self.tensors.items() if name not in (TOKENS_TENSOR, CHECKSUMS_TENSOR)}

    def list_checksummed_names(self) -> list[str]:
        """Names of the tensors in the order of their checksums; the header's checksum comes last."""
        return sorted(name for name in self.tensors if name != CHECKSUMS_TENSOR)

    def verify(self, checksums: Sequence[int]) -> dict[str, int]:
        """Compare the header with the last of the file's checksums; returns the others by tensor.

        Raises SegmentFileError.
        """
        shapes = {name: (place.dtype, place.shape) for name, place in self.tensors.items()}
        if header_checksum(self.meta, shapes) != checksums[-1]:
            raise SegmentFileError("checksum", f"header of {self.meta.kind} {self.meta.id}")
        return dict(zip(self.list_checksummed_names(), checksums[:-1], strict=True))


class _DecodedTensor(msgspec.Struct):
    coding: str
    dtype: str
    shape: list[int]


class _Tensor(msgspec.Struct, omit_defaults=True):
    dtype: str
    shape: Sequence[int]
    data_offsets: tuple[int, int]
    decoded: _DecodedTensor | None = None


def tensor_checksum(name: str, start: int, end: int, chunks: Iterable[bytes | bytearray | memoryview]) -> int:
    """xxh3_64 of a tensor's name, place and bytes; `chunks` are its raw bytes in order, cut anywhere."""
    hasher = tensor_hasher(name, start, end)
    for part in chunks:
        hasher.update(part)
    return hasher.intdigest()


def tensor_hasher(name: str, start: int, end: int) -> xxhash.xxh3_64:
    """Hasher to be fed a tensor's bytes: its `intdigest` is `tensor_checksum`."""
    return xxhash.xxh3_64(name.encode() + start.to_bytes(8, "little") + end.to_bytes(8, "little"))


def header_checksum(meta: FileMeta, shapes: Mapping[str, tuple[str, Sequence[int]]]) -> int:
    """xxh3_64 of the file's own description: its place, and each tensor's dtype and shape, however it is written."""
    tensors = (
        f"\0{name} {shapes[name][0]} {list(shapes[name][1])}" for name in sorted(shapes) if name != CHECKSUMS_TENSOR
    )
    return xxhash.xxh3_64_intdigest((meta.to_json() + "".join(tensors)).encode())


def file_checksum(checksums: Iterable[int]) -> str:
    """SavedFile.checksum: xxh3_64, in hex, over the file's checksums as u64le."""
    return xxhash.xxh3_64_hexdigest(b"".join(value.to_bytes(8, "little") for value in checksums))


def encode_header(
    meta: FileMeta,
    shapes: Mapping[str, tuple[str, Sequence[int]]],
    coded_bytes: Mapping[str, int] | None = None,
    bytes_min: int = 0,
) -> bytes:
    """Bytes before the tensors of a file whose tensors (dtype and shape) follow in this order.

    `coded_bytes` has the stored sizes of coded tensors.  A header shorter than `bytes_min` is filled with spaces.
    """
    fields: dict[str, object] = {"__metadata__": {METADATA_KEY: meta.to_json()}}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        stored, decoded = math.prod(shape) * DTYPE_BYTES[dtype], None
        if coded_bytes and name in coded_bytes:
            stored, decoded = coded_bytes[name], _DecodedTensor(CODING, dtype, list(shape))
            dtype, shape = "U8", (stored,)
        fields[name] = _Tensor(dtype, shape, (offset, offset + stored), decoded)
        offset += stored
    text = msgspec.json.encode(fields)
    text += b" " * max(-len(text) % HEADER_ALIGN, bytes_min - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> SegmentHeader:
    """Header of a file; checks that the frame is whole and the file as long as it says, but no content."""
    with _open_file(path) as file:
        return read_header_from(file)


def read_checksums(path: Path) -> list[int]:
    """Checksums of tensors in the order of `SegmentHeader.list_checksummed_names`, and the header's; not verified."""
    with _open_file(path) as file:
        return read_checksums_from(file, read_header_from(file))


def read_tokens(path: Path) -> bytes:
    """Packed ids of a segment, their checksum verified."""
    with _open_file(path) as file:
        return read_tokens_from(file, read_header_from(file))


def verify_file(path: Path) -> None:
    """Read the whole file and compare the header and every tensor with its checksum."""
    with _open_file(path) as file:
        verify_open_file(file, read_header_from(file))


# ---- the same of an open file, which may lie within another one


def read_tokens_from(file: BinaryIO, header: SegmentHeader) -> bytes:
    """As `read_tokens`, from an open file."""
    _verify_tensors(file, header, [TOKENS_TENSOR])
    return b"".join(iter_tensor_bytes(file, header.tensors[TOKENS_TENSOR]))


def verify_open_file(file: BinaryIO, header: SegmentHeader) -> None:
    """As `verify_file`, on an open file."""
    _verify_tensors(file, header, header.list_checksummed_names())


@contextmanager
def _open_file(path: Path) -> Iterator[BinaryIO]:
    try:
        with BufferedReader(disk.open_to_read(path)) as file:
            yield file
    except FileNotFoundError as error:
        raise SegmentFileError("missing", path.name) from error
    except OSError as error:
        raise SegmentFileError("io", f"{path.name}: {error}") from error


def read_header_from(file: BinaryIO) -> SegmentHeader:
    """As `read_header`, from an open file; the file ends where it can be read no further."""
    file_bytes = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if file_bytes < 8 or (length <= HEADER_BYTES_MAX and file_bytes < 8 + length):
        raise SegmentFileError("truncated", f"{file_bytes} bytes end inside the header")
    if length > HEADER_BYTES_MAX:
        raise SegmentFileError("foreign", f"a header of {length} bytes")
    fields = _decode_fields(file.read(length))
    meta = _decode_meta(fields.pop("__metadata__", None))
    tensors = {name: _decode_tensor_info(name, raw, 8 + length, file_bytes) for name, raw in fields.items()}
    header = SegmentHeader(meta, tensors, file_bytes)
    _check_header(header)
    return header


def _decode_fields(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return decode(raw, dict[str, msgspec.Raw])
    except _DECODE_ERRORS as error:
        raise SegmentFileError("checksum", f"header does not parse: {error}") from error


def _decode_meta(raw: msgspec.Raw | None) -> FileMeta:
    try:
        texts = decode(raw or b"{}", dict[str, str])
        meta = decode(texts.get(METADATA_KEY, "").encode(), FileMeta)
    except _DECODE_ERRORS as error:
        raise SegmentFileError("foreign", f"not a segment file: {error}") from error
    if meta.format not in (SEGMENT_FORMAT, CODED_SEGMENT_FORMAT):
        known = f"{SEGMENT_FORMAT} and {CODED_SEGMENT_FORMAT}"
        raise SegmentFileError("foreign", f"segment format {meta.format}, this version reads {known}")
    return meta


def _decode_tensor_info(name: str, raw: msgspec.Raw, data_start: int, file_bytes: int) -> TensorInfo:
    try:
        tensor = decode(raw, _Tensor)
    except _DECODE_ERRORS as error:
        raise SegmentFileError("checksum", f"header of {name} does not parse: {error}") from error
    begin, end = tensor.data_offsets
    if begin < 0 or min(tensor.shape, default=0) < 0 or tensor.dtype not in DTYPE_BYTES:
        raise SegmentFileError("checksum", f"header of {name} makes no sense")
    if end - begin != math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]:
        raise SegmentFileError("checksum", f"shape and bytes of {name} disagree")
    if data_start + end > file_bytes:
        raise SegmentFileError("truncated", f"{name} ends at byte {data_start + end} of {file_bytes}")
    info = TensorInfo(tensor.dtype, tuple(tensor.shape), data_start + begin, end - begin)
    return _decode_coded_info(name, info, tensor.decoded) if tensor.decoded else info


def _decode_coded_info(name: str, stored: TensorInfo, decoded: _DecodedTensor) -> TensorInfo:
    if decoded.coding != CODING:
        raise SegmentFileError("foreign", f"{name} has the coding {decoded.coding!r}, this version reads {CODING!r}")
    if decoded.dtype != CODED_DTYPE or name in (TOKENS_TENSOR, CHECKSUMS_TENSOR) or min(decoded.shape, default=0) < 0:
        raise SegmentFileError("checksum", f"header of {name} makes no sense")
    info = TensorInfo(decoded.dtype, tuple(decoded.shape), stored.offset, stored.stored_bytes, is_coded=True)
    if info.bytes_count > CODING_RATIO_MAX * info.stored_bytes:  # a copy would be larger than this file, without bounds
        raise SegmentFileError("checksum", f"{name} is stored in {info.stored_bytes} of {info.bytes_count} bytes")
    return info


def _check_header(header: SegmentHeader) -> None:
    meta, checksums, tokens = header.meta, header.tensors.get(CHECKSUMS_TENSOR), header.tensors.get(TOKENS_TENSOR)
    if checksums is None or checksums.bytes_count != 8 * (len(header.list_checksummed_names()) + 1):
        raise SegmentFileError("checksum", "not one checksum a tensor and one of the header")
    places = header.tensors.values()
    if max(place.offset + place.stored_bytes for place in places) != header.file_bytes:
        raise SegmentFileError("truncated", "the file is longer than its tensors")
    if any(place.is_coded for place in places) and not header.is_coded:
        raise SegmentFileError("checksum", f"coded tensors in a file of format {meta.format}")
    data_bytes = header.file_bytes - min(place.offset for place in places)
    if (
        sum(place.stored_bytes for place in places) > data_bytes
    ):  # a copy would be larger than this file, without bounds
        raise SegmentFileError("checksum", "tensors overlap")
    if meta.kind == "checkpoint":
        return
    if not 0 <= meta.start < meta.end:
        raise SegmentFileError("checksum", f"rows [{meta.start}, {meta.end})")
    if tokens is None or tokens.bytes_count != (meta.end - meta.start) * TOKEN_BYTES:
        raise SegmentFileError("tokens", f"not one token a row of [{meta.start}, {meta.end})")


def _verify_tensors(file: BinaryIO, header: SegmentHeader, names: list[str]) -> None:
    checksums = header.verify(read_checksums_from(file, header))
    for name in names:
        if name not in checksums:
            raise SegmentFileError("tokens", f"no tensor {name}")
        if tensor_checksum(name, *header.meta.span, iter_tensor_bytes(file, header.tensors[name])) != checksums[name]:
            raise SegmentFileError("checksum", f"{name} of [{header.meta.start}, {header.meta.end})")


def read_checksums_from(file: BinaryIO, header: SegmentHeader) -> list[int]:
    """As `read_checksums`, from an open file."""
    values = array("Q", b"".join(iter_tensor_bytes(file, header.tensors[CHECKSUMS_TENSOR])))
    if byteorder == "big":
        values.byteswap()
    return values.tolist()


def iter_tensor_bytes(file: BinaryIO, tensor: TensorInfo) -> Iterator[bytes]:
    """Decoded bytes of a tensor, a few MB at a time at most.

    Raises SegmentFileError where the file ends before, and where they can't be decoded.
    """
    file.seek(tensor.offset)
    if tensor.is_coded:
        yield from map(bytes, decode_tensor(tensor, lambda count: b"".join(iter_bytes(file, count))))
    else:
        yield from iter_bytes(file, tensor.bytes_count)


def decode_tensor(tensor: TensorInfo, read: Callable[[int], bytes | bytearray | memoryview]) -> Iterator[memoryview]:
    """Decoded bytes of a coded tensor, each part valid until the next; `read` as in `segment_coding.decode`.

    Raises SegmentFileError, and what `read` raises.
    """
    from warmline_common.storage import segment_coding  # here, since most files have no coded tensors

    try:
        yield from segment_coding.decode(read, tensor.stored_bytes, tensor.bytes_count)
    except segment_coding.CodingError as error:
        raise SegmentFileError("checksum", f"a coded tensor: {error}") from error


def iter_bytes(file: BinaryIO, count: int) -> Iterator[bytes]:
    """The next bytes of a file, a few MB at a time.  Raises SegmentFileError where the file ends before."""
    while count:
        part = file.read(min(count, READ_CHUNK_BYTES))
        if not part:
            raise SegmentFileError("truncated", "the file became shorter while it was read")
        count -= len(part)
        yield part
