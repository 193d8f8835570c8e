"""An index between its opening and its end: bookkeeping, full, of another schema, not there."""

from pathlib import Path

import pytest
from index_helpers import LAYOUT, MODEL, ROOT, make_home, matched, save

from warmline_proxy.index import Index, IndexFull, IndexReader, NoIndex, WrongSchema
from warmline_proxy.rows import RequestRecord
from warmline_wire.home import Home
from warmline_wire.keys import pack_tokens, unpack_tokens

A = list(range(1000, 4000))


def record(number: int) -> RequestRecord:
    return RequestRecord(
        id=str(number), at=float(number), endpoint="chat", client_model="m", outcome="ok", source="cold"
    )


def test_the_last_thousand_requests_are_kept(index: Index) -> None:
    for number in range(1100):
        index.record(record(number))
    index.flush()
    assert len(index.requests()) == 1000
    assert [row.id for row in index.requests(2)] == ["1099", "1098"]


def test_bookkeeping_is_written_at_the_end(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, A[:10])
        used = index.segments()[0].id
        index.note_use([used, "ab" * 16])  # one that is gone by now
        index.note_use([used])
        index.record(record(1))
    with IndexReader(home) as reader:
        assert reader.usage(used).hits == 2 and reader.usage(used).last_used > 0
        assert len(reader.requests()) == 1
        assert reader.verify(deep=True) == []


def test_survives_a_reopen_and_is_private(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, A[:3000], checkpoints=[100])
    with Index(home, 1 << 30) as index:
        assert matched(index, A) == 3000
        assert index.verify() == []
    modes = {path.name: path.stat().st_mode & 0o777 for path in home.index.rglob("*")}
    assert modes == {"1": 0o700, "data.mdb": 0o600, "lock.mdb": 0o600}


def test_a_full_map_refuses_the_save_and_serves_on(tmp_path: Path) -> None:
    home = make_home(tmp_path / "h")
    with Index(home, 1 << 30, map_bytes=1 << 20) as index:
        save(index, A[:1000])
        with pytest.raises(IndexFull, match="1 MiB"):
            for number in range(100):
                save(index, [number, *range(8000)])
        for number in range(2000):
            index.record(record(number))  # more than fits: bookkeeping is lost, the writer lives on
        index.flush()
        assert matched(index, A) == 1000
        assert index.match(ROOT, pack_tokens(A), 10).tokens == 10


def test_another_schema_is_refused(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        index.change(lambda tables: tables.put("meta", b"schema", b"99"))
    with pytest.raises(WrongSchema, match="newer"):
        Index(home, 1 << 30)
    with pytest.raises(WrongSchema, match="schema 99"):
        IndexReader(home)


def test_no_index_is_said_clearly(home: Home) -> None:
    with pytest.raises(NoIndex, match="no index"):
        IndexReader(home)


def test_tokens_are_kept_as_they_were(index: Index) -> None:
    index.begin_save(ROOT, MODEL, b"", checkpoints=[], layout=LAYOUT)
    save(index, [0, 2**32 - 1, 5])
    stored = index.change(lambda tables: tables.tokens(index.segments()[0].id))
    assert unpack_tokens(stored) == [0, 2**32 - 1, 5]
