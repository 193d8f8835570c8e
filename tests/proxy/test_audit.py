"""Warm requests computed again, cold, against a fake backend: when, how often, and what comes of a difference."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_backend import FakeBackend, first_logits, layout, packed
from harness import Pair, on_loop, pair

from warmline_proxy import condemn
from warmline_proxy.app import LIVES
from warmline_proxy.audit import WAITING_MAX, Auditor
from warmline_proxy.config import Config
from warmline_proxy.index import IndexFailure
from warmline_proxy.metrics import Metrics
from warmline_proxy.plan import on_grid
from warmline_proxy.recompute import Recomputer
from warmline_proxy.rows import Replay, ReplayReply, ReplayRequest, RequestRecord
from warmline_proxy.upstream import Refused
from warmline_wire.home import Home
from warmline_wire.messages import HEADER_BACKGROUND, HEADER_REUSE, FirstLogits, decode, encode

TEXT = "word " * 40
ASKED = f"<user>{TEXT}\n<assistant>"
QUESTIONS = ["And of Spain?", "And of Italy?", "And of Peru?"]
COLLAPSED = ["!"] * 80


def turn(number: int, backend: FakeBackend) -> dict[str, Any]:
    """The conversation's turn of that number: 0 is cold, the others go on from what was said."""
    said = "".join(backend.answer)
    messages = [{"role": "user", "content": TEXT}]
    for question in QUESTIONS[:number]:
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
    return {"messages": messages}


async def talk(proxy: Pair, turns: int = 2) -> list[str]:
    """Where each turn started."""
    return [(await proxy.chat(**turn(number, proxy.backend))).headers["X-Warmline-Cache"] for number in range(turns)]


def metric(proxy: Pair, sample: str) -> Callable[[], Any]:
    async def value() -> float:
        async with proxy.client.get(f"{proxy.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(sample))

    return value


async def audits(proxy: Pair, count: int = 1) -> None:
    """Wait until so many have come to an end."""
    counted = metric(proxy, "warmline_audits_total{")
    while await counted() < count:
        pass


async def records(proxy: Pair) -> list[RequestRecord]:
    """Oldest first."""
    return (await proxy.settled())[::-1]


def audited(backend: FakeBackend) -> int:
    return sum(HEADER_BACKGROUND in headers for headers in backend.calls["generate"])


@on_loop
async def test_a_warm_request_is_computed_again_cold_and_a_cold_one_is_not(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        assert await talk(proxy) == ["cold 0", f"resident {len(ASKED + 'Paris.')}"]
        await audits(proxy)
        assert audited(proxy.backend) == 1
        headers, body = proxy.backend.calls["generate"][-1], proxy.backend.calls["prompts"][-1]
        assert HEADER_REUSE not in headers
        asked = f"<user>{TEXT}\n<assistant>Paris.\n<user>And of Spain?\n<assistant>"
        assert (bytes(body["prompt"]).decode(), body["max_tokens"]) == (asked, 1)
        assert [record.audit for record in await records(proxy)] == ["", "equal"]
        assert await metric(proxy, 'warmline_audits_total{outcome="equal",why="chance"}')() == 1


@on_loop
async def test_rounding_is_tolerated(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.layout = layout(dtype="float32")
        proxy.backend.logprob, proxy.backend.cold_logprobs = -0.2501, [-0.2506]
        await talk(proxy)
        await audits(proxy)
        assert [record.audit for record in await records(proxy)] == ["", "within"]
        assert not proxy.index.quarantined()


@on_loop
async def test_what_differs_is_never_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        await talk(proxy)
        await audits(proxy)
        assert [record.audit for record in await records(proxy)] == ["", "differs"]
        aside = proxy.index.quarantined()
        assert aside and all("suspect" in row.reason for row in aside) and not proxy.index.segments()
        assert not proxy.backend.held, "it has left the backend's memory, too"
        differs, wrong = [record.message for record in caplog.records if "AUDIT" in record.message]
        assert "differ by 2.75e+00" in differs
        assert f"wrong from token 0 on; {len(aside)} files are quarantined" in wrong
        assert await metric(proxy, 'warmline_quarantined_total{reason="suspect"}')() == 1
        next_turn = await proxy.chat(**turn(2, proxy.backend))
        assert next_turn.headers["X-Warmline-Cache"] == "cold 0"
        await audits(proxy)
        assert audited(proxy.backend) == 3, "nothing but that, that again, and the start from what is stored"


def ends(proxy: Pair) -> list[int]:
    """Of the segments of a single path."""
    return sorted(row.end for row in proxy.index.segments())


@pytest.mark.parametrize(("grid", "right"), [(0, 0), (0, 1), (0, 2), (8, 1)])
@on_loop
async def test_what_lies_before_the_first_wrong_file_stays(tmp_path: Path, right: int, grid: int) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.layout = layout(has_windows=True, dtype="float32", grid=grid)  # windows: no file swallows another
        for number in range(3):
            await proxy.chat(**turn(number, backend))
            await proxy.settled()
        await audits(proxy, 2)
        backend.restart()
        places = ends(proxy)
        backend.right_until = [0, *places][right]
        backend.cold_logprobs = [-3.0] * 9
        warm = await proxy.chat(**turn(3, backend))
        assert warm.headers["X-Warmline-Cache"] == f"restored {on_grid(places[-1], grid)}"
        await audits(proxy, 3)
        await proxy.settled()
        assert ends(proxy) == places[:right] and len(proxy.index.quarantined()) == len(places) - right + 1
        assert all(len(asked.tokens) // 4 % (grid or 1) == 0 for asked in backend.calls["restore"])
        backend.restart()
        expected = f"restored {backend.right_until}" if right else "cold 0"
        assert (await proxy.chat(**turn(3, backend))).headers["X-Warmline-Cache"] == expected


@on_loop
async def test_where_what_is_stored_agrees_all_goes(tmp_path: Path) -> None:
    """It was in memory, and nobody knows what was computed from that."""
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.right_until, backend.cold_logprobs = 10_000, [-3.0] * 3
        await talk(proxy)
        await audits(proxy)
        assert (await records(proxy))[-1].audit == "differs"
        assert proxy.index.quarantined() and not proxy.index.segments() and not backend.held


@on_loop
async def test_what_was_computed_since_does_not_pay_for_who_had_started_from_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        noted, note, audits_allowed = [], proxy.index.note_audit, [0]

        def noting(request_id: str, audit: str, guard: str) -> None:
            noted.append(audit)
            note(request_id, audit, guard)

        monkeypatch.setattr(proxy.index, "note_audit", noting)
        monkeypatch.setattr(Auditor, "_is_quiet", property(lambda _: len(noted) < audits_allowed[0]))
        proxy.backend.cold_logprobs = [-3.0] * 9
        await talk(proxy, 3)
        await proxy.settled()  # else the last of them would be suspect itself, and not be audited
        audits_allowed[0] = 1
        await audits(proxy, 1)
        assert (await proxy.chat(**turn(3, proxy.backend))).headers["X-Warmline-Cache"] == "cold 0"
        await proxy.settled()
        audits_allowed[0] = 2
        await audits(proxy, 2)
        assert noted == ["differs", "differs"]
        assert len(proxy.index.segments()) == 1 and len(proxy.backend.held) == 1


@on_loop
async def test_while_it_is_searched_nothing_like_it_is_used(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.cold_logprobs = [-3.0, -3.0]
        backend.restoring_allowed.clear()
        await talk(proxy)
        await backend.called("restore")
        cold = await proxy.chat(**turn(2, backend))
        assert cold.headers["X-Warmline-Cache"] == "cold 0"
        assert (await records(proxy))[-1].why_not_warmer == "what is stored after token 0 is suspect"
        backend.restoring_allowed.set()
        await audits(proxy)
        warm = await proxy.chat(**turn(3, backend))
        assert warm.headers["X-Warmline-Cache"] == "resident 300", "that was computed without it, and stays"


@on_loop
async def test_a_proxy_that_stops_in_the_midst_of_that_takes_all_out(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.cold_logprobs = [-3.0, -3.0]
        backend.restoring_allowed.clear()
        await talk(proxy)
        await backend.called("restore")
        await proxy.stop_proxy()
        proxy.index.flush()
        assert proxy.index.requests(1)[0].audit == "differs"
        assert proxy.index.quarantined() and not proxy.index.segments()
        backend.restoring_allowed.set()


@on_loop
async def test_who_was_just_restoring_it_starts_otherwise(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        backend = proxy.backend
        await talk(proxy, 1)
        await proxy.settled()
        backend.restart()
        backend.restoring_allowed.clear()
        restoring = asyncio.create_task(proxy.chat(**turn(1, backend)))
        await backend.called("restore")
        (life,) = list(proxy.app[LIVES])
        life.suspect = True
        for row in proxy.index.segments():
            proxy.index.quarantine(row.id, "suspect")
        backend.restoring_allowed.set()
        assert (await restoring).headers["X-Warmline-Cache"] == "cold 0"
        await proxy.settled()
        assert len(backend.held) == 1 and proxy.index.segments(), "what it has computed is kept"


@on_loop
async def test_so_is_what_came_from_disk(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        await talk(proxy, 1)
        await proxy.settled()
        proxy.backend.restart()
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        warm = await proxy.chat(**turn(1, proxy.backend))
        assert warm.headers["X-Warmline-Cache"].startswith("restored")
        await audits(proxy)
        assert not proxy.index.segments() and not proxy.backend.held


@on_loop
async def test_a_little_noise_does_not_hide_a_fault(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.layout = layout(dtype="float32")
        proxy.backend.logprob, proxy.backend.cold_logprobs = -0.2501, [-3.0001, -3.0021]
        await talk(proxy)
        await audits(proxy)
        assert (await records(proxy))[-1].audit == "differs"


@pytest.mark.parametrize("cold", [[-3.0, -0.25], [-3.0, -7.0]])
@on_loop
async def test_a_machine_that_does_not_repeat_itself_is_no_broken_cache(tmp_path: Path, cold: list[float]) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.cold_logprobs = cold
        await talk(proxy)
        await audits(proxy)
        assert [record.audit for record in await records(proxy)] == ["", "unstable"]
        assert not proxy.index.quarantined() and proxy.backend.held


@on_loop
async def test_in_exact_mode_a_single_bit_counts(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.layout = layout(grid=8, dtype="float32")
        proxy.backend.logprob, proxy.backend.cold_logprobs = -0.25, [-0.25000003, -0.25000003]
        starts = await talk(proxy)
        assert starts[1] == f"resident {len(ASKED + 'Paris.') // 8 * 8}"
        await audits(proxy)
        assert (await records(proxy))[-1].audit == "differs"


@on_loop
async def test_a_request_of_another_conversation_keeps_what_it_has(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        await proxy.client.post(f"{proxy.url}/v1/completions", json={"prompt": "quite another"})
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        await talk(proxy)
        await audits(proxy)
        assert len(proxy.index.segments()) == 1 and len(proxy.backend.held) == 1


@on_loop
async def test_who_has_started_from_it_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.cold_logprobs = [-3.0, -3.0]
        backend.background_allowed.clear()
        await talk(proxy)
        await backend.called("generate", 3)
        backend.hold_after = 1
        running = asyncio.create_task(proxy.chat(**turn(2, backend)))
        await backend.holding.wait()
        backend.hold_after = None
        backend.background_allowed.set()  # the audit's first run ends, the second waits for the running request
        backend.let_go.set()
        assert (await running).headers["X-Warmline-Cache"].startswith("resident")
        await audits(proxy)
        await proxy.settled()
        assert not proxy.index.segments() and not backend.held


@pytest.mark.parametrize("suspect", [False, True])
@on_loop
async def test_nobody_follows_who_has_started_from_it(tmp_path: Path, suspect: bool) -> None:
    async with pair(tmp_path) as proxy:
        backend = proxy.backend
        await talk(proxy, 1)
        backend.hold_after = 0
        long = turn(1, backend)["messages"] + [{"role": "user", "content": TEXT}]
        running = asyncio.create_task(proxy.chat(messages=long))
        await backend.holding.wait()
        while not (computing := [each for each in proxy.app[LIVES] if each.is_computing]):
            await proxy.status()
        computing[0].suspect = suspect
        backend.hold_after = None
        other = await proxy.chat(messages=long)
        assert (other.headers["X-Warmline-Cache"].split()[0] == "shared") == (not suspect)
        backend.let_go.set()
        await running


@on_loop
async def test_what_could_not_be_dropped_is_not_adopted_again(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        backend.cold_logprobs, backend.drops_fail = [-3.0, -3.0], 9
        await talk(proxy)
        await audits(proxy)
        backend.drops_fail = 0
        assert backend.held, "or it proves nothing"
        backend.gone_count = 1  # whoever meets it has the proxy ask for all that is in memory
        again = await proxy.chat(**turn(2, backend))
        assert again.headers["X-Warmline-Cache"] == "cold 0"


@on_loop
async def test_it_waits_until_nobody_runs(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        await talk(proxy, 1)
        backend.hold_after = 1
        other = asyncio.create_task(proxy.client.post(f"{proxy.url}/v1/completions", json={"prompt": "another"}))
        await backend.holding.wait()
        backend.hold_after = None
        await proxy.chat(**turn(1, backend))
        assert not audited(backend)
        backend.let_go.set()
        await other
        await audits(proxy)
        assert (await records(proxy))[1].audit == "equal"


@pytest.mark.parametrize(("ended", "outcome"), [(2, "equal"), (3, "abandoned")])
@on_loop
async def test_one_that_made_way_is_tried_again_but_not_for_ever(tmp_path: Path, ended: int, outcome: str) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.gives_up_background = ended
        await talk(proxy)
        await audits(proxy)
        assert (await records(proxy))[-1].audit == outcome and audited(proxy.backend) == 3


@on_loop
async def test_a_proxy_that_stops_gives_them_up(tmp_path: Path) -> None:
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.background_allowed.clear()
        await talk(proxy)
        await proxy.backend.called("generate", 3)
        await proxy.stop_proxy()
        proxy.index.flush()
        assert proxy.index.requests(1)[0].audit == "abandoned"
        proxy.backend.background_allowed.set()


@on_loop
async def test_what_can_not_be_quarantined_yet_is_not_used_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(condemn, "RETRY_INTERVAL_S", 0.0)
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        quarantine, writable = proxy.index.quarantine, asyncio.Event()

        def fails(file_id: str, reason: str) -> list[str]:
            if not writable.is_set():
                raise IndexFailure("as scripted")
            return quarantine(file_id, reason)

        monkeypatch.setattr(proxy.index, "quarantine", fails)
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        await talk(proxy)
        await audits(proxy)
        assert proxy.index.segments() and not proxy.backend.held
        cold = await proxy.chat(**turn(2, proxy.backend))
        assert cold.headers["X-Warmline-Cache"] == "cold 0"
        record = (await records(proxy))[-1]
        assert record.why_not_warmer == "what is stored after token 0 is suspect"
        assert not await metric(proxy, 'warmline_quarantined_total{reason="suspect"}')()
        writable.set()
        while not proxy.index.quarantined():
            await proxy.status()


# ---- answers that collapse


@on_loop
async def test_a_collapsed_answer_is_audited_though_chance_did_not_choose_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        proxy.backend.answer = COLLAPSED
        await talk(proxy)
        await audits(proxy)
        cold, warm = await records(proxy)
        assert cold.guard == warm.guard == "model: one token repeated over 65 tokens"
        assert (cold.audit, warm.audit) == ("", "equal")
        assert await metric(proxy, 'warmline_audits_total{outcome="model",why="guard"}')() == 1
        assert not proxy.index.quarantined()


@on_loop
async def test_where_cold_disagrees_it_was_the_cache(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        proxy.backend.answer, proxy.backend.cold_logprobs = COLLAPSED, [-3.0, -3.0]
        await talk(proxy)
        await audits(proxy)
        warm = (await records(proxy))[-1]
        assert (warm.audit, warm.guard) == ("differs", "cache: one token repeated over 65 tokens")
        assert proxy.index.quarantined() and not proxy.index.segments()
        next_turn = await proxy.chat(**turn(2, proxy.backend))
        assert next_turn.headers["X-Warmline-Cache"] == "cold 0"


@on_loop
async def test_also_where_its_client_would_not_hear_more(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        backend = proxy.backend
        backend.answer = COLLAPSED
        await talk(proxy, 1)
        backend.hold_after = 75
        body = {**turn(1, backend), "stream": True}
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=body) as response:
            await response.content.readuntil(b"!")
            await backend.holding.wait()
        await audits(proxy)
        warm = (await records(proxy))[-1]
        assert (warm.outcome, warm.audit) == ("cancelled", "equal")


@on_loop
async def test_the_guard_can_be_switched_off(tmp_path: Path) -> None:
    async with pair(tmp_path, garbage_guard="off") as proxy:
        proxy.backend.answer = COLLAPSED
        await talk(proxy)
        assert [record.guard for record in await records(proxy)] == ["", ""] and not audited(proxy.backend)


# ---- who is chosen, and who waits


def auditor(folder: Path, fraction: float, noted: list[Any]) -> Any:
    """One that only gathers: nothing of it runs."""
    config = Config(home=Home(folder), audit_fraction=fraction)
    rest: dict[str, Any] = dict.fromkeys(["recomputer", "condemner", "admission", "lives", "watchdog"])
    rest |= {"index": SimpleNamespace(note_audit=lambda *what: noted.append(what)), "metrics": Metrics()}
    return Auditor(config=config, chance=random.Random(7), **rest)


def life(name: str, *, reuse: int = 10, collapse: str = "", outcome: str = "ok", length: int = 20) -> Any:
    """As much of a request as is looked at."""
    trace = SimpleNamespace(
        id=name,
        collapse=collapse,
        outcome=outcome,
        plan=SimpleNamespace(reuse=reuse),
        settled=SimpleNamespace(first=first_logits(-1.0)),
    )
    prompt = SimpleNamespace(tokens=packed(b"x" * length))
    return SimpleNamespace(trace=trace, suspect=False, prompt=prompt, layout=layout(), root=b"root")


def waiting(found: Any) -> list[str]:
    return [case.request_id for case in found._waiting]


def test_chance_chooses_a_share_of_the_warm_ones_that_were_answered(tmp_path: Path) -> None:
    found = auditor(tmp_path, 0.2, noted := [])
    for number in range(1000):
        found.consider(life(str(number)))
        found.consider(life("cold", reuse=0))
        found.consider(life("cancelled", outcome="cancelled"))
    dropped = len(noted)
    assert len(waiting(found)) == WAITING_MAX and 150 < WAITING_MAX + dropped < 250
    assert not {"cold", "cancelled"} & set(waiting(found))
    assert {(audit, guard) for _, audit, guard in noted} == {("abandoned", "")}


@pytest.mark.parametrize("busy", ["", "down", "running", "queued", "computing"])
def test_a_moment_is_quiet_while_nobody_is_there(tmp_path: Path, busy: str) -> None:
    found = auditor(tmp_path, 1.0, [])
    found._watchdog = SimpleNamespace(is_up=busy != "down")
    found._admission = SimpleNamespace(running=busy == "running", queued=busy == "queued")
    found._lives = [SimpleNamespace(is_computing=False), SimpleNamespace(is_computing=busy == "computing")]
    assert found._is_quiet == (not busy)


def test_the_newest_goes_where_too_many_wait_and_who_collapsed_comes_first(tmp_path: Path) -> None:
    found = auditor(tmp_path, 1.0, noted := [])
    for number in range(WAITING_MAX):
        found.consider(life(str(number)))
    found.consider(life("late"))
    found.consider(life("collapsed", collapse="digits"))
    found.consider(life("collapsed too", collapse="digits"))
    assert waiting(found)[:3] == ["collapsed", "collapsed too", "0"] and len(waiting(found)) == WAITING_MAX
    assert [name for name, *_ in noted] == ["late", str(WAITING_MAX - 1), str(WAITING_MAX - 2)]
    assert f"warmline_audits_waiting {WAITING_MAX}" in found._metrics.exposition().decode()


def test_what_waits_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    found = auditor(tmp_path, 1.0, noted := [])
    for name in ("one", "two", "three"):
        found.consider(life(name, length=3 << 20))
    assert waiting(found) == ["one", "two"] and [name for name, *_ in noted] == ["three"]


# ---- on demand


async def replayed(proxy: Pair, **wanted: Any) -> list[Replay]:
    headers = {"Authorization": f"Bearer {proxy.home.secret()}"}
    body = encode(ReplayRequest(**wanted))
    async with proxy.client.post(f"{proxy.url}/warmline/replay", data=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return decode(await response.read(), ReplayReply).replays


@on_loop
async def test_a_replay_restores_computes_cold_and_compares(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        await talk(proxy)
        await proxy.settled()
        proxy.backend.restart()
        (replay,) = await replayed(proxy)
        stored = len(proxy.index.stored_tokens(proxy.index.sessions()[0].leaf)) // 4
        assert (replay.outcome, replay.tokens, replay.reused) == ("equal", stored, stored)
        assert not proxy.backend.held, "nothing of it stays in memory"
        assert await replayed(proxy, session=replay.session) == [replay]


@on_loop
async def test_a_replay_that_differs_quarantines(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        await talk(proxy)
        await proxy.settled()
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        (replay,) = await replayed(proxy)
        assert (replay.outcome, replay.difference) == ("differs", 2.75) and replay.quarantined
        assert not proxy.index.segments() and not proxy.backend.held
        assert not await replayed(proxy)


@pytest.mark.parametrize(("reason", "aside"), [("checksum", ["checksum"]), ("io", [])])
@on_loop
async def test_a_replay_that_can_not_be_restored_is_damaged(tmp_path: Path, reason: str, aside: list[str]) -> None:
    async with pair(tmp_path) as proxy:
        await talk(proxy, 1)
        await proxy.settled()
        proxy.backend.refuse_restores = [reason]
        (replay,) = await replayed(proxy)
        assert replay.outcome == "damaged" and reason in replay.detail and replay.quarantined == len(aside)
        assert [row.reason for row in proxy.index.quarantined()] == aside


@on_loop
async def test_a_conversation_that_the_backend_refuses_does_not_end_the_replay_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(self: Recomputer, root: bytes, tokens: bytes) -> FirstLogits:
        raise Refused(400, b'{"error": {"message": "too long"}}')

    async with pair(tmp_path) as proxy:
        await talk(proxy, 1)
        await proxy.settled()
        monkeypatch.setattr(Recomputer, "cold", refuses)
        (replay,) = await replayed(proxy)
        assert (replay.outcome, replay.detail) == ("skipped", "400: too long")


@on_loop
async def test_a_replay_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        headers = {"Authorization": f"Bearer {proxy.home.secret()}"}
        for body in (encode(ReplayRequest(session="none")), b"{"):
            async with proxy.client.post(f"{proxy.url}/warmline/replay", data=body, headers=headers) as response:
                assert response.status == 400 and "Not a replay" in await response.text()
