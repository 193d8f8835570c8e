"""The header of a safetensors file, read by hand: mlx's own reader may crash on a broken file, or say little.

8 bytes    N, the header's length, little-endian
N bytes    JSON: tensor name -> dtype, shape, data_offsets (from the header's end); and "__metadata__"
the rest   the tensors' bytes
"""

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000  # as the safetensors library has it
POINTER_BYTES_MAX = 1024
INT64_MAX = (1 << 63) - 1
LFS_POINTER = b"version https://git-lfs"
DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2}
DTYPE_BYTES |= {"BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8}

DOWNLOAD_REMEDY = "download this file again"


class ShardError(Exception):
    """The file is not whole; `todo` says what helps."""

    def __init__(self, what: str, todo: str = DOWNLOAD_REMEDY) -> None:
        super().__init__(what)
        self.todo = todo


@dataclass(frozen=True)
class ShardTensor:
    dtype: str
    shape: tuple[int, ...]
    bytes_count: int


@dataclass(frozen=True)
class Shard:
    name: str
    tensors: dict[str, ShardTensor]
    trailing_bytes: int  # of the file, after the last tensor

    @property
    def bytes_count(self) -> int:
        """Of the tensors alone."""
        return sum(tensor.bytes_count for tensor in self.tensors.values())


def read_shard(path: Path) -> Shard:
    """Raises BadShard.  Reads the header and nothing else, however large the file is."""
    try:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise ShardError("is no file", "remove it, and download the file of this name")
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(LENGTH_BYTES + POINTER_BYTES_MAX)
            _check_start(start, size)
            length = int.from_bytes(start[:LENGTH_BYTES], "little")
            if length > size - LENGTH_BYTES:
                raise ShardError(f"its header says {length:,} bytes, the file has only {size:,}: truncated, or not one")
            if length > HEADER_BYTES_MAX:
                raise ShardError(f"its header says {length:,} bytes, more than a safetensors file's may have")
            file.seek(LENGTH_BYTES)
            header = file.read(length)
    except FileNotFoundError:
        raise ShardError("a link to a file that is not there") from None
    except OSError as error:
        raise ShardError(
            f"can't be read: {error.strerror or error}", "mend the file's permissions or its disk"
        ) from None
    tensors, end = _parse_tensors(header)
    if (beyond := size - LENGTH_BYTES - length - end) < 0:
        raise ShardError(f"truncated: {-beyond:,} of {end + length + LENGTH_BYTES:,} bytes are missing at its end")
    return Shard(path.name, tensors, beyond)


def _check_start(start: bytes, size: int) -> None:
    if not size:
        raise ShardError("is empty")
    if start.startswith(LFS_POINTER):
        raise ShardError("is a Git LFS pointer, not the file itself", "run `git lfs pull` in the folder")
    if size < LENGTH_BYTES:
        raise ShardError(f"truncated: it has {size} bytes")


def _parse_tensors(header: bytes) -> tuple[dict[str, ShardTensor], int]:
    """The tensors by name, and where their bytes end."""
    try:
        entries: Any = json.loads(header.decode())
    except (ValueError, RecursionError):
        raise ShardError("its header is no JSON: damaged, or no safetensors file") from None
    if not isinstance(entries, dict):
        raise ShardError("its header is no JSON object: damaged, or no safetensors file")
    entries.pop("__metadata__", None)
    tensors, places = {}, []
    for name, entry in entries.items():
        if not _is_tensor_entry(entry):
            raise ShardError(f"its header's entry for {name} is damaged")
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        width = DTYPE_BYTES.get(dtype)
        if start > end or (width and math.prod(shape) * width != end - start):
            raise ShardError(f"its header contradicts itself: {name} is {dtype} {list(shape)} in {end - start:,} bytes")
        tensors[name] = ShardTensor(dtype, shape, end - start)
        places.append((start, end, name))
    places.sort()
    for (_, end, name), (start, _, other) in pairwise(places):
        if start < end:
            raise ShardError(f"its header contradicts itself: {name} and {other} share bytes")
    return tensors, max((end for _, end, _ in places), default=0)


def _is_tensor_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(type(number) is int and 0 <= number <= INT64_MAX for number in (*shape, *offsets))
