"""Quarantine of prefixes that differ from a cold run: removed, kept, and unused meanwhile."""

import asyncio
import time
from pathlib import Path

import pytest

from support.proxy.audits import (
    TEXT,
    ask_turns,
    count_audits,
    list_records,
    make_metric_reader,
    make_turn,
    wait_for_audits,
)
from support.proxy.fake_backend import make_first_logits, make_layout
from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_proxy.app import COMPONENTS, REQUEST_REGISTRY
from warmline_proxy.audit import quarantine as quarantine_module
from warmline_proxy.audit.bisect import AuditMismatch
from warmline_proxy.audit.quiet import QuietEngine
from warmline_proxy.index.index import IndexStoreError
from warmline_proxy.planner import align_to_grid


@on_loop
async def test_differing_prefix_is_never_reused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        assert [record.audit for record in await list_records(proxy)] == ["", "differs"]
        aside = proxy.index.quarantined()
        assert aside and all("suspect" in row.reason for row in aside) and not proxy.index.segments()
        assert not proxy.backend.residents, "it has left the backend's memory, too"
        differs, wrong = [record.message for record in caplog.records if "AUDIT" in record.message]
        assert "differ by 2.75e+00" in differs
        assert f"wrong from token 0 on; {len(aside)} files are quarantined" in wrong
        assert await make_metric_reader(proxy, 'warmline_quarantined_total{reason="suspect"}')() == 1
        next_turn = await proxy.chat(**make_turn(2, proxy.backend))
        assert next_turn.headers["X-Warmline-Cache"] == "cold 0"
        await wait_for_audits(proxy)
        assert count_audits(proxy.backend) == 3, "nothing but that, that again, and the start from what is stored"


def list_segment_ends(proxy: ProxyHarness) -> list[int]:
    """List the ends of a single path's segments."""
    return sorted(row.end for row in proxy.index.segments())


@pytest.mark.parametrize(("grid", "right"), [(0, 0), (0, 1), (0, 2), (8, 1)])
@on_loop
async def test_segments_before_first_wrong_one_stay(tmp_path: Path, right: int, grid: int) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.layout = make_layout(has_windows=True, dtype="float32", grid=grid)  # windows: no file swallows another
        for number in range(3):
            await proxy.chat(**make_turn(number, backend))
            await proxy.wait_until_saved()
        await wait_for_audits(proxy, 2)
        backend.restart()
        positions = list_segment_ends(proxy)
        backend.correct_until = [0, *positions][right]
        backend.cold_logprobs = [-3.0] * 9
        warm = await proxy.chat(**make_turn(3, backend))
        assert warm.headers["X-Warmline-Cache"] == f"restored {align_to_grid(positions[-1], grid)}"
        await wait_for_audits(proxy, 3)
        await proxy.wait_until_saved()
        assert (
            list_segment_ends(proxy) == positions[:right]
            and len(proxy.index.quarantined()) == len(positions) - right + 1
        )
        assert all(len(request.tokens) // 4 % (grid or 1) == 0 for request in backend.calls["restore"])
        backend.restart()
        expected = f"restored {backend.correct_until}" if right else "cold 0"
        assert (await proxy.chat(**make_turn(3, backend))).headers["X-Warmline-Cache"] == expected


@on_loop
async def test_wrong_resident_with_right_files_quarantines_all(tmp_path: Path) -> None:
    """The fault was in memory, and what was computed from it is not known."""
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.correct_until, backend.cold_logprobs = 10_000, [-3.0] * 3
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        assert (await list_records(proxy))[-1].audit == "differs"
        assert proxy.index.quarantined() and not proxy.index.segments() and not backend.residents


@on_loop
async def test_later_computed_tokens_survive_audit_of_earlier_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        recorded, record, audits_allowed = [], proxy.index.record_audit, [0]

        def recording(request_id: str, audit: str, guard: str) -> None:
            recorded.append(audit)
            record(request_id, audit, guard)

        monkeypatch.setattr(proxy.index, "record_audit", recording)
        monkeypatch.setattr(
            QuietEngine, "quiet_s", property(lambda _: 0.0 if len(recorded) < audits_allowed[0] else None)
        )
        proxy.backend.cold_logprobs = [-3.0] * 9
        await ask_turns(proxy, 3)
        await proxy.wait_until_saved()  # else the last of them would be suspect itself, and not be audited
        audits_allowed[0] = 1
        await wait_for_audits(proxy, 1)
        assert (await proxy.chat(**make_turn(3, proxy.backend))).headers["X-Warmline-Cache"] == "cold 0"
        await proxy.wait_until_saved()
        audits_allowed[0] = 2
        await wait_for_audits(proxy, 2)
        assert recorded == ["differs", "differs"]
        assert len(proxy.index.segments()) == 1 and len(proxy.backend.residents) == 1


@on_loop
async def test_suspect_prefix_is_unused_during_bisection(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.cold_logprobs = [-3.0, -3.0]
        backend.restoring_allowed.clear()
        await ask_turns(proxy)
        await backend.wait_for_calls("restore")
        cold = await proxy.chat(**make_turn(2, backend))
        assert cold.headers["X-Warmline-Cache"] == "cold 0"
        assert (await list_records(proxy))[-1].why_not_warmer == "what is stored after token 0 is suspect"
        backend.restoring_allowed.set()
        await wait_for_audits(proxy)
        warm = await proxy.chat(**make_turn(3, backend))
        assert warm.headers["X-Warmline-Cache"] == "resident 300", "that was computed without it, and stays"


@on_loop
async def test_proxy_stop_during_bisection_quarantines_all(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.cold_logprobs = [-3.0, -3.0]
        backend.restoring_allowed.clear()
        await ask_turns(proxy)
        await backend.wait_for_calls("restore")
        await proxy.stop_proxy()
        proxy.index.flush()
        assert proxy.index.requests(1)[0].audit == "differs"
        assert proxy.index.quarantined() and not proxy.index.segments()
        backend.restoring_allowed.set()


@on_loop
async def test_request_restoring_suspect_prefix_starts_cold(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        backend = proxy.backend
        await ask_turns(proxy, 1)
        await proxy.wait_until_saved()
        backend.restart()
        backend.restoring_allowed.clear()
        restoring = asyncio.create_task(proxy.chat(**make_turn(1, backend)))
        await backend.wait_for_calls("restore")
        (life,) = list(proxy.app[REQUEST_REGISTRY])
        life.suspect = True
        for row in proxy.index.segments():
            proxy.index.quarantine(row.id, "suspect")
        backend.restoring_allowed.set()
        assert (await restoring).headers["X-Warmline-Cache"] == "cold 0"
        await proxy.wait_until_saved()
        assert len(backend.residents) == 1 and proxy.index.segments(), "what it has computed is kept"


@on_loop
async def test_differing_restored_prefix_is_quarantined(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        await ask_turns(proxy, 1)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        warm = await proxy.chat(**make_turn(1, proxy.backend))
        assert warm.headers["X-Warmline-Cache"].startswith("restored")
        await wait_for_audits(proxy)
        assert not proxy.index.segments() and not proxy.backend.residents


@on_loop
async def test_other_conversations_are_kept(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        await proxy.client.post(f"{proxy.url}/v1/completions", json={"prompt": "quite another"})
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        assert len(proxy.index.segments()) == 1 and len(proxy.backend.residents) == 1


@on_loop
async def test_request_started_from_suspect_prefix_saves_nothing(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        backend = proxy.backend
        await ask_turns(proxy)
        await proxy.wait_until_saved()
        backend.hold_after = 1
        running = asyncio.create_task(proxy.chat(**make_turn(2, backend)))
        await backend.holding.wait()
        while not (computing := [each for each in proxy.app[REQUEST_REGISTRY] if each.is_computing]):
            await proxy.status()
        (request,) = computing
        cold, began = make_first_logits(-3.0), time.monotonic()
        case = AuditMismatch(request.root, request.rendered.tokens, 10, cold, backend.layout, 1e-3, began)
        quarantining = asyncio.create_task(
            proxy.app[COMPONENTS].audits.audits[0].quarantine.quarantine(case, "a replay")
        )
        while not request.suspect:
            await proxy.status()
        backend.may_continue.set()  # the bisection waits for the running request
        assert (await running).headers["X-Warmline-Cache"].startswith("resident")
        await quarantining
        await proxy.wait_until_saved()
        assert not proxy.index.segments() and not backend.residents


@pytest.mark.parametrize("suspect", [False, True])
@on_loop
async def test_suspect_request_is_not_followed(tmp_path: Path, suspect: bool) -> None:
    async with run_proxy(tmp_path) as proxy:
        backend = proxy.backend
        await ask_turns(proxy, 1)
        backend.hold_after = 0
        long = make_turn(1, backend)["messages"] + [{"role": "user", "content": TEXT}]
        running = asyncio.create_task(proxy.chat(messages=long))
        await backend.holding.wait()
        while not (computing := [each for each in proxy.app[REQUEST_REGISTRY] if each.is_computing]):
            await proxy.status()
        computing[0].suspect = suspect
        backend.hold_after = None
        other = await proxy.chat(messages=long)
        assert (other.headers["X-Warmline-Cache"].split()[0] == "shared") == (not suspect)
        backend.may_continue.set()
        await running


@on_loop
async def test_undropped_suspect_resident_is_not_adopted_again(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.cold_logprobs, backend.drop_failures = [-3.0, -3.0], 9
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        backend.drop_failures = 0
        assert backend.residents, "or it proves nothing"
        backend.gone_count = 1  # whoever meets it has the proxy ask for all that is in memory
        again = await proxy.chat(**make_turn(2, backend))
        assert again.headers["X-Warmline-Cache"] == "cold 0"


@on_loop
async def test_prefix_is_unused_until_index_can_quarantine_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine_module, "RETRY_INTERVAL_S", 0.0)
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        quarantine, writable = proxy.index.quarantine, asyncio.Event()

        def fails(file_id: str, reason: str) -> list[str]:
            if not writable.is_set():
                raise IndexStoreError("as scripted")
            return quarantine(file_id, reason)

        monkeypatch.setattr(proxy.index, "quarantine", fails)
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        assert proxy.index.segments() and not proxy.backend.residents
        cold = await proxy.chat(**make_turn(2, proxy.backend))
        assert cold.headers["X-Warmline-Cache"] == "cold 0"
        record = (await list_records(proxy))[-1]
        assert record.why_not_warmer == "what is stored after token 0 is suspect"
        assert not await make_metric_reader(proxy, 'warmline_quarantined_total{reason="suspect"}')()
        writable.set()
        while not proxy.index.quarantined():
            await proxy.status()
