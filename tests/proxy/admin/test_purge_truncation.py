"""What runs on what a purge cuts away of a file that others share."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import on_loop, pair
from support.proxy.purges import ALIKE, LONG, LONGER, held, let_go, purged, purged_while_read, spoken
from warmline_common.protocol.messages import SavedFile
from warmline_common.storage.home import Home
from warmline_proxy.retention import truncate as index_cut
from warmline_proxy.store.rows import SavePlan, SegmentRow


def written(home: Home, row: SegmentRow, plan: SavePlan) -> SavedFile:
    """The rest of a file such as the fake backend writes them: nothing is in it."""
    path = home.segment_file(plan.segments[0].id)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(b"rest")
    return SavedFile(id=plan.segments[0].id, bytes_written=4, checksum="rest")


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cut, "_write_shortened", written)


@pytest.mark.usefixtures("cuts")
@on_loop
async def test_what_runs_on_what_is_cut_away_does_not_bring_it_back(tmp_path: Path) -> None:
    """And what runs on the rest of the same file is kept."""
    async with pair(tmp_path) as proxy:
        session, other = await spoken(proxy, LONG), await spoken(proxy, ALIKE)
        running = await held(proxy, LONGER)
        (cut,) = (await purged(proxy, session=session))["cuts"]
        assert cut["until"] < cut["end"] and not cut["why_not"]
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens == 0
        assert [row.id for row in proxy.index.sessions()] == [other]
        assert proxy.index.segment(cut["became"])
        running = await held(proxy, [*ALIKE, *LONGER[1:]])
        await purged(proxy, session="0" * 12)
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens > 0


@on_loop
async def test_what_begins_while_the_rest_of_a_file_is_written_does_not_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as proxy:
        session, _ = await spoken(proxy, LONG), await spoken(proxy, ALIKE)
        began, may_go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

        def writing(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(began.set)
            may_go_on.wait()
            return written(*arguments)

        monkeypatch.setattr(index_cut, "_write_shortened", writing)
        purge = asyncio.create_task(purged(proxy, session=session))
        await began.wait()
        running = await held(proxy, LONGER)
        may_go_on.set()
        assert [cut["why_not"] for cut in (await purge)["cuts"]] == [""]
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens == 0
        assert len(proxy.index.sessions()) == 1


@pytest.mark.usefixtures("cuts")
@on_loop
async def test_a_file_that_is_cut_and_being_read_goes_before_the_purge_answers(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session, _ = await spoken(proxy, LONG), await spoken(proxy, ALIKE)
        (old,) = [row.id for row in proxy.index.segments() if not row.parent]
        running, purge = await purged_while_read(proxy, session, ALIKE)
        assert proxy.home.segment_file(old).exists() and not purge.done()
        proxy.backend.restoring_allowed.set()
        await purge
        assert not proxy.home.segment_file(old).exists()
        assert (await running).status == 200
        assert (await proxy.settled())[0].source == "restored"
