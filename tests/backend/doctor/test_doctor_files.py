"""Findings of `warmline doctor` about a folder's files, from broken files written by hand."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from warmline_backend.doctor.files import INDEX_NAME, check_files
from warmline_backend.doctor.findings import FindingLevel, Findings

Tensors = Mapping[str, int]  # how many float32 values each has


def write_shard(path: Path, tensors: Tensors) -> None:
    header, end = {}, 0
    for name, count in tensors.items():
        header[name] = {"dtype": "F32", "shape": [count], "data_offsets": [end, end + 4 * count]}
        end += 4 * count
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def make_shard_name(number: int, total: int = 3) -> str:
    return f"model-{number:05}-of-{total:05}.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of three valid shards and their index."""
    (tmp_path / "config.json").write_text("{}")
    places = {}
    for number in (1, 2, 3):
        write_shard(tmp_path / make_shard_name(number), {f"layers.{number}.weight": 8, f"layers.{number}.bias": 2})
        places |= {f"layers.{number}.{kind}": make_shard_name(number) for kind in ("weight", "bias")}
    write_index(tmp_path, places)
    return tmp_path


def write_index(folder: Path, places: Mapping[str, str], total_size: int = 120) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(places)}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def read_weight_map(folder: Path) -> dict[str, str]:
    places: dict[str, str] = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    return places


def find(folder: Path) -> Findings:
    findings = Findings("files")
    check_files(findings, folder)
    return findings


def list_messages(folder: Path, level: FindingLevel) -> str:
    """All findings of one level; there must be some."""
    lines = [f"{each.what} -> {each.todo}" for each in find(folder) if each.level is level]
    assert lines
    return "\n".join(lines)


def test_whole_files_are_ok(folder: Path) -> None:
    (finding,) = find(folder)
    assert finding.level is FindingLevel.OK
    assert "3 files" in finding.what and "0.1 KB, 6 tensors" in finding.what


def test_missing_indexed_file_is_named(folder: Path) -> None:
    (folder / make_shard_name(2)).unlink()
    assert f"1 of 3 files that the index names are missing: {make_shard_name(2)}" in list_messages(
        folder, FindingLevel.FAIL
    )


def test_missing_file_is_found_by_numbering(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    (folder / make_shard_name(3)).unlink()
    assert f"1 of 3 files are missing: {make_shard_name(3)}" in list_messages(folder, FindingLevel.FAIL)


def test_two_numberings_are_reported(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    write_shard(folder / make_shard_name(1, 2), {"other": 1})
    assert "1 of 2, 3 of 3" in list_messages(folder, FindingLevel.FAIL)


def write_one_entry(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0, 4]") -> bytes:
    """Write a file of four bytes whose header has one entry."""
    header = f'{{"a": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"abc", "truncated: it has 3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n", "git lfs pull"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "its header says 1,099,511,627,776 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        ((3).to_bytes(8, "little") + b"{..", "no JSON"),
        ((13).to_bytes(8, "little") + b'{"a":{"b":1}}', "entry for a is damaged"),
        (bytes(8), "no JSON"),
        ((4).to_bytes(8, "little") + b'{"\xff"', "no JSON"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "no JSON"),
        (write_one_entry(shape="[1e999]"), "entry for a is damaged"),
        (write_one_entry(shape="[-1, -1]"), "entry for a is damaged"),
        (write_one_entry(shape="[1.7]"), "entry for a is damaged"),
        (write_one_entry(shape='"1"', offsets='"04"'), "entry for a is damaged"),
        (write_one_entry(dtype="null"), "entry for a is damaged"),
        (write_one_entry(shape=f"[{10**30}]"), "entry for a is damaged"),
    ],
)
def test_non_safetensors_file_is_found(folder: Path, content: bytes, what: str) -> None:
    (folder / make_shard_name(2)).write_bytes(content)
    assert what in list_messages(folder, FindingLevel.FAIL)


def test_truncated_file_reports_missing_bytes(folder: Path) -> None:
    path = folder / make_shard_name(2)
    path.write_bytes(path.read_bytes()[:-7])
    assert f"{make_shard_name(2)}: truncated: 7 of" in list_messages(folder, FindingLevel.FAIL)


def test_tensor_with_wrong_size_is_found(folder: Path) -> None:
    path = folder / make_shard_name(2)
    path.write_bytes(path.read_bytes().replace(b'"shape": [8]', b'"shape": [9]'))
    assert "layers.2.weight is F32 [9] in 32 bytes" in list_messages(folder, FindingLevel.FAIL)


def test_overlapping_tensors_are_found(folder: Path) -> None:
    path = folder / make_shard_name(2)
    path.write_bytes(path.read_bytes().replace(b'"data_offsets": [32, 40]', b'"data_offsets": [28, 36]'))
    assert "layers.2.weight and layers.2.bias share bytes" in list_messages(folder, FindingLevel.FAIL)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_folder_named_like_file_is_found(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / make_shard_name(2)).unlink()
    make(folder / make_shard_name(2))
    assert f"{make_shard_name(2)}: is no file" in list_messages(folder, FindingLevel.FAIL)


def test_dangling_link_is_found(folder: Path) -> None:
    """The hub's cache is made of links."""
    (folder / make_shard_name(2)).unlink()
    (folder / make_shard_name(2)).symlink_to(folder / "blobs" / "gone")
    assert "a link to a file that is not there" in list_messages(folder, FindingLevel.FAIL)


def test_misplaced_and_duplicate_tensors_are_found(folder: Path) -> None:
    write_index(folder, {**read_weight_map(folder), "layers.9.weight": make_shard_name(1)})
    assert "1 tensors are not in the file that the index names, nor in another" in list_messages(
        folder, FindingLevel.FAIL
    )
    write_index(
        folder, {**read_weight_map(folder), "layers.1.bias": make_shard_name(3), "layers.9.weight": make_shard_name(1)}
    )
    assert "1 tensors are in another file than the index says: layers.1.bias" in list_messages(
        folder, FindingLevel.WARN
    )
    write_shard(folder / make_shard_name(3), {"layers.3.weight": 8, "layers.3.bias": 2, "layers.1.bias": 2})
    assert "1 tensors are in several files" in list_messages(folder, FindingLevel.FAIL)


def test_unindexed_files_and_tensors_are_found(folder: Path) -> None:
    write_shard(folder / "model-mtp.safetensors", {"extra": 1})
    warnings = list_messages(folder, FindingLevel.WARN)
    assert "does not name model-mtp.safetensors" in warnings and "not in the index: extra" in warnings


def test_wrong_total_size_is_found(folder: Path) -> None:
    write_index(folder, read_weight_map(folder), total_size=121)
    assert "121 bytes of tensors, the files hold 120" in list_messages(folder, FindingLevel.WARN)


@pytest.mark.parametrize("place", [".", ".cache/huggingface/download"])
def test_interrupted_download_is_found(folder: Path, place: str) -> None:
    (folder / place).mkdir(parents=True, exist_ok=True)
    (folder / place / "abc.incomplete").touch()
    assert "an interrupted download left abc.incomplete" in list_messages(folder, FindingLevel.WARN)


def test_other_weight_formats_are_found(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX_NAME]:
        path.unlink()
    (folder / "pytorch_model.bin").touch()
    assert "there is pytorch_model.bin, which mlx-lm does not read" in list_messages(folder, FindingLevel.FAIL)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"{", "no valid JSON"),
        (b"[]", "no JSON object"),
        (b"\xff{}", "no valid JSON"),
        (b"\xef\xbb\xbf{}", "no valid JSON"),
        ("{}".encode("utf-16"), "no valid JSON"),
        (b'{"a":' * 100_000, "no valid JSON"),
    ],
)
def test_damaged_config_or_index_is_found(folder: Path, text: bytes, what: str) -> None:
    for name in ("config.json", INDEX_NAME):
        (folder / name).write_bytes(text)
        assert f"{name} " in list_messages(folder, FindingLevel.FAIL) and what in list_messages(
            folder, FindingLevel.FAIL
        )


@pytest.mark.parametrize("metadata", [[1], "120", None, {"total_size": 1.5}, {"total_size": "120"}])
def test_extra_index_fields_are_ignored(folder: Path, metadata: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": metadata, "weight_map": read_weight_map(folder)}))
    assert [finding.level for finding in find(folder)] == [FindingLevel.OK]


def test_index_without_weight_map_is_found(folder: Path) -> None:
    (folder / INDEX_NAME).write_text('{"weight_map": {"a": 1}}')
    assert "has no weight_map" in list_messages(folder, FindingLevel.FAIL)
