"""Homes with coded segments: verified, rebuilt, cut, exported and imported as others are."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from support.index import archives
from support.index.archives import TALK, check_content, export_session, import_session, save
from support.index.damage import flip_bit
from support.index.truncation import LONG, SHORT, clear_tables, count_stored, find_segment
from warmline_common.protocol.messages import SavedFile
from warmline_common.storage import disk, segment_writer
from warmline_common.storage.segment_file import FileMeta, iter_tensor_bytes, read_header, read_header_from
from warmline_common.storage.segment_writer import SegmentWriter
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import PurgeRequest


@pytest.fixture(autouse=True)
def coded_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have saves write rows as bfloat16, coded: their bytes are the lower ones of values."""

    def write_file(path: Path, meta: FileMeta, tensors: dict[str, tuple[str, Sequence[int], bytes]]) -> SavedFile:
        tensors = {name: _widen(*tensor) for name, tensor in tensors.items()}
        writer = SegmentWriter(meta, {name: tensor[:2] for name, tensor in tensors.items()}, is_coded=True)
        chunks = writer.iter_chunks(lambda name: [tensors[name][2]])
        size = disk.write_durable(path, chunks, lambda: writer.header)
        return SavedFile(id=meta.id, bytes_written=size, checksum=writer.checksum)

    def read_tensor(path: Path, name: str) -> bytes:
        with path.open("rb") as file:
            place = read_header_from(file).tensors[name]
            data = b"".join(iter_tensor_bytes(file, place))
        return data[::2] if place.dtype == "BF16" else data

    monkeypatch.setattr(segment_writer, "CODED_BYTES_MIN", 1)
    monkeypatch.setattr(archives, "write_file", write_file)
    monkeypatch.setattr(archives, "read_tensor", read_tensor)


def _widen(dtype: str, shape: Sequence[int], data: bytes) -> tuple[str, Sequence[int], bytes]:
    if len(shape) < 4:
        return dtype, shape, data
    return "BF16", shape, (np.frombuffer(data, np.uint8) | np.uint16(0x3F00)).astype("<u2").tobytes()


def list_coded(index: Index) -> list[bool]:
    return [read_header(index.home.segment_file(row.id)).is_coded for row in index.segments()]


def test_coded_files_are_verified_and_counted(index: Index) -> None:
    save(index, LONG)
    save(index, SHORT)
    assert list_coded(index) == [True, True]
    assert verify_index(index, deep=True) == []
    sizes = [index.home.segment_file(row.id).stat().st_size for row in index.segments()]
    assert [row.bytes_on_disk for row in index.segments()] == sizes
    path = index.home.segment_file(find_segment(index, LONG).id)
    flip_bit(path, read_header(path).tensors["0.kv.keys"].offset + 100)
    assert [finding.what for finding in verify_index(index, deep=True)] == ["checksum"]
    flip_bit(path, read_header(path).tensors["0.kv.keys"].offset + 100)


def test_index_is_rebuilt_from_coded_files(index: Index) -> None:
    save(index, LONG, [100, 300])
    save(index, SHORT)
    index.transact(clear_tables)
    assert repair(index, deep=True, is_saving=False).did
    check_content(index, LONG, checkpoints=[100, 300])
    check_content(index, SHORT)


def test_coded_segment_is_cut_and_stays_coded(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    old = find_segment(index, LONG)
    forecast = purge(index, PurgeRequest(session=session, dry_run=True))
    reply = purge(index, PurgeRequest(session=session))
    assert [(cut.segment, cut.until, cut.end) for cut in reply.cuts] == [(old.id, 30, 300)]
    assert 0 < reply.cuts[0].bytes_count < old.bytes_on_disk
    assert abs(forecast.cuts[0].bytes_count - reply.cuts[0].bytes_count) < 1000  # by the share of rows
    assert count_stored(index, LONG) == 30 and list_coded(index) == [True, True]
    check_content(index, SHORT)
    assert verify_index(index, deep=True) == []


def test_archive_of_coded_segments_has_plain_ones(index: Index, other: Index) -> None:
    """Whole and cut ones: any version can import it."""
    save(index, TALK)
    session = save(index, [*TALK[:250], 7, 8, 9], [253])
    data = export_session(index, session)
    assert b'"decoded"' not in data
    import_session(other, data)
    check_content(other, [*TALK[:250], 7, 8, 9], checkpoints=[253])
    assert list_coded(index)[0] and not any(list_coded(other))
    assert verify_index(other, deep=True) == []
