"""Checks of a model's files: all present and whole.  No mlx: a broken file must not reach it."""

import json
import math
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from warmline_backend.doctor.findings import CheckError, Findings, format_bytes, format_first
from warmline_backend.model.model import can_be_repository, expand_path
from warmline_common.settings.hints import FOLDER_ADVICE

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000  # as the safetensors library has it
POINTER_BYTES_MAX = 1024
INT64_MAX = (1 << 63) - 1
LFS_POINTER = b"version https://git-lfs"
DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2}
DTYPE_BYTES |= {"BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8}

DOWNLOAD_REMEDY = "download this file again"
DISK_REMEDY = "fix its permissions, or the disk"
VERSIONS_REMEDY = "nothing, if the parameters below are right; otherwise files of two versions are mixed"


class ShardError(CheckError):
    """A file that is not whole."""

    def __init__(self, what: str, todo: str = DOWNLOAD_REMEDY) -> None:
        super().__init__(what, todo)


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
        """Bytes of the tensors alone."""
        return sum(tensor.bytes_count for tensor in self.tensors.values())


def read_shard(path: Path) -> Shard:
    """Header of a safetensors file, however large the file is.  Raises ShardError."""
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
        raise ShardError(f"can't be read: {error.strerror or error}", DISK_REMEDY) from None
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
    """(tensors by name, end offset of their bytes) of a header."""
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


def find_model(findings: Findings, model: str) -> Path:
    """Folder of a path or a repository's name.  Raises CheckError."""
    try:
        local = expand_path(model)
        if model and local.is_dir():
            return local
        is_there = bool(model) and local.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such user's home, a name that is too long ...
        raise CheckError(f"{model}: no folder can be called so: {error}", FOLDER_ADVICE) from None
    if is_there:
        raise CheckError(f"{model} is a file", "give the folder that it lies in")
    if not can_be_repository(model):
        raise CheckError(f"{model}: there is no such folder", FOLDER_ADVICE)
    return _find_snapshot(model)


def _find_snapshot(repository: str) -> Path:
    """Snapshot of a repository's main branch in the hub's cache.  Raises CheckError."""
    cache = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    with suppress(OSError):
        commit = (cache / "refs" / "main").read_text().strip()
        if commit and (cache / "snapshots" / commit).is_dir():
            return cache / "snapshots" / commit
    what = f"{repository} is neither a folder here nor in the hub's cache ({cache})"
    raise CheckError(what, f"download it first: hf download {repository}")


CONFIG_NAME, INDEX_NAME, SINGLE_FILE_NAME = "config.json", "model.safetensors.index.json", "model.safetensors"
WEIGHTS_GLOB = "model*.safetensors"  # what mlx-lm reads
SHARD_NAME_PATTERN = re.compile(r"(.*-)(\d+)-of-(\d+)\.safetensors")
FINISH_DOWNLOAD_REMEDY = "finish the download: start it again; it continues where it stopped"


@dataclass(frozen=True)
class ModelFiles:
    config: dict[str, Any]  # empty where config.json can't be read
    tensor_names: set[str]


def check_files(findings: Findings, folder: Path) -> ModelFiles:
    config = _read_config(findings, folder)
    _check_incomplete_downloads(findings, folder)
    paths = sorted(folder.glob(WEIGHTS_GLOB))
    if not paths:
        _report_no_weights(findings, folder)
    shards = [shard for path in paths if (shard := _examine_shard(findings, path))]
    if (index := _read_index(findings, folder)) is not None:
        _check_index(findings, index, paths, shards)
    else:
        _check_numbering(findings, [path.name for path in paths])
    counts = Counter(name for shard in shards for name in shard.tensors)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        findings.fail(
            f"{len(twice)} tensors are in several files, and which of them is used is left to chance: "
            f"{format_first(twice)}",
            "remove the files of the other download",
        )
    if shards and len(shards) == len(paths):
        total = format_bytes(sum(shard.bytes_count for shard in shards))
        count = _format_file_count(len(shards))
        findings.ok(f"{count} of weights, {total}, {counts.total():,} tensors, none truncated")
    return ModelFiles(config, set(counts))


def _format_file_count(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _read_json_object(findings: Findings, path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes().decode())
    except OSError as error:
        findings.fail(f"{path.name} can't be read: {error.strerror or error}", DISK_REMEDY)
    except (ValueError, RecursionError) as error:
        findings.fail(f"{path.name} is no valid JSON: {error}", DOWNLOAD_REMEDY)
    else:
        if isinstance(content, dict):
            return content
        findings.fail(f"{path.name} holds no JSON object", DOWNLOAD_REMEDY)
    return None


def _read_config(findings: Findings, folder: Path) -> dict[str, Any]:
    if (folder / CONFIG_NAME).is_file():
        return _read_json_object(findings, folder / CONFIG_NAME) or {}
    findings.fail(f"there is no {CONFIG_NAME}", "give the folder that holds the model's files, or download it again")
    return {}


def _check_incomplete_downloads(findings: Findings, folder: Path) -> None:
    """Check for leftovers of an interrupted download in the folder, in its .cache, or in the hub's cache."""
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    drafts = [path for place in places for path in sorted(place.glob("*.incomplete"))]
    if drafts:
        findings.warn(
            f"an interrupted download left {format_first(path.name for path in drafts)} in {drafts[0].parent}",
            FINISH_DOWNLOAD_REMEDY,
        )


def _report_no_weights(findings: Findings, folder: Path) -> None:
    others = sorted(path.name for kind in ("*.safetensors", "*.gguf", "*.bin", "*.npz") for path in folder.glob(kind))
    listed = f"; there is {format_first(others)}, which mlx-lm does not read" if others else ""
    todo = "download a model in MLX's format, or convert it"
    findings.fail(f"no weights: nothing is called {WEIGHTS_GLOB}{listed}", todo)


def _examine_shard(findings: Findings, path: Path) -> Shard | None:
    try:
        shard = read_shard(path)
    except ShardError as problem:
        findings.fail(f"{path.name}: {problem}", problem.todo)
        return None
    except Exception as error:  # noqa: BLE001  whatever else is wrong with it, its name is what helps
        findings.fail(f"{path.name} can't be examined: {type(error).__name__}: {error}", DOWNLOAD_REMEDY)
        return None
    if shard.trailing_bytes:
        findings.warn(f"{path.name} has {shard.trailing_bytes:,} bytes after its last tensor", "download it again")
    return shard


def _read_index(findings: Findings, folder: Path) -> dict[str, Any] | None:
    """Index of shards, with a weight_map of names to names; None where there is no usable one."""
    index = _read_json_object(findings, folder / INDEX_NAME) if (folder / INDEX_NAME).is_file() else None
    places = index.get("weight_map") if index is not None else None
    if index is not None and not (isinstance(places, dict) and all(isinstance(name, str) for name in places.values())):
        findings.fail(f"{INDEX_NAME} has no weight_map of tensor names to file names", DOWNLOAD_REMEDY)
        return None
    return index


def _check_index(findings: Findings, index: dict[str, Any], paths: list[Path], shards: list[Shard]) -> None:
    places: dict[str, str] = index["weight_map"]
    named, present = set(places.values()), {path.name for path in paths}
    if missing := sorted(named - present):
        count = _format_file_count(len(named))
        what = f"{len(missing)} of {count} that the index names are missing: {format_first(missing)}"
        findings.fail(what, FINISH_DOWNLOAD_REMEDY)
    if extra := sorted(present - named):
        findings.warn(
            f"the index does not name {format_first(extra)}, but mlx-lm reads every {WEIGHTS_GLOB}",
            "remove the files of another model or an older download",
        )
    _check_tensor_files(findings, places, shards)
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(shard.bytes_count for shard in shards)
    if isinstance(total, int) and named == present and len(shards) == len(paths) and total != held:
        findings.warn(
            f"the index says {total:,} bytes of tensors, the files hold {held:,}",
            "compare with the repository: index and files may be of different versions",
        )


def _check_tensor_files(findings: Findings, weight_map: dict[str, str], shards: list[Shard]) -> None:
    found = {name: shard.name for shard in shards for name in shard.tensors}
    read = {shard.name for shard in shards}
    if absent := sorted(name for name, place in weight_map.items() if place in read and name not in found):
        findings.fail(
            f"{len(absent)} tensors are not in the file that the index names, nor in another: {format_first(absent)}",
            "download index and files again: they are of different versions",
        )
    moved = sorted(name for name, place in weight_map.items() if place in read and found.get(name, place) != place)
    unnamed = sorted(found.keys() - weight_map.keys())
    parts = ((moved, "are in another file than the index says"), (unnamed, "in the files are not in the index"))
    for names, what in parts:
        if names:
            findings.warn(f"{len(names)} tensors {what}: {format_first(names)}", VERSIONS_REMEDY)


def _check_numbering(findings: Findings, names: list[str]) -> None:
    """Check the number of files by their names, where there is no index."""
    parts = [match for name in names if (match := SHARD_NAME_PATTERN.fullmatch(name))]
    series = Counter((match[1], match[3]) for match in parts)
    if len(series) > 1:
        listed = ", ".join(f"{count} of {int(total)}" for (_, total), count in sorted(series.items()))
        findings.fail(f"files of several numberings are mixed: {listed}", "keep those of one download, remove the rest")
    elif series:
        ((start, total),) = series
        numbers = {int(match[2]) for match in parts}
        if missing := sorted(set(range(1, int(total) + 1)) - numbers):
            lacking = format_first(f"{start}{number:0{len(total)}}-of-{total}.safetensors" for number in missing)
            findings.fail(f"{len(missing)} of {int(total)} files are missing: {lacking}", FINISH_DOWNLOAD_REMEDY)
    if parts and SINGLE_FILE_NAME in names:
        what = f"{SINGLE_FILE_NAME} lies beside numbered files, and mlx-lm reads all of them"
        findings.fail(what, "keep those of one download")
    if parts and len(series) == 1:
        findings.warn(f"there is no {INDEX_NAME}", "download it too: it says which files belong to the model")
