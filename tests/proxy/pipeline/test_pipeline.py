"""Requests against a fake backend: warm starts, failures, disconnects, waits."""

import asyncio
import gzip
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support.proxy.fake_backend import make_layout
from support.proxy.harness import on_loop, perf_lines, run_proxy, serve
from warmline_common.protocol.messages import HEADER_CHECKPOINTS, HEADER_REUSE
from warmline_common.protocol.tokens import namespace, unpack_tokens

TEXT = "word " * 40


def make_second_turn(text: str = TEXT) -> dict[str, Any]:
    messages = [("user", text), ("assistant", "Paris."), ("user", "And of Spain?")]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


@on_loop
async def test_next_turn_starts_from_resident(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(TEXT)
        response = await proxy.chat(**make_second_turn())
        reused = len(f"<user>{TEXT}\n<assistant>Paris.")
        assert response.headers["X-Warmline-Cache"] == f"resident {reused}"
        assert proxy.backend.calls["generate"][1][HEADER_REUSE] == str(reused)
        await proxy.wait_until_saved()
        first, second = perf_lines(caplog)
        assert "source=cold" in first and 'miss="nothing stored"' in first
        assert re.search(r"source=resident render=\S+ plan=\S+ restore=0\.000s wait=\S+ prefill=0\.100s", second)
        assert f"cached={reused} restored=0" in second


@on_loop
async def test_next_turn_is_restored_after_restart(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(TEXT)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        response = await proxy.chat(**make_second_turn())
        reused = len(f"<user>{TEXT}\n<assistant>Paris.")
        assert response.headers["X-Warmline-Cache"] == f"restored {reused}"
        restore = proxy.backend.calls["restore"][0]
        assert restore.root == proxy.backend.calls["save"][0].root == namespace("f" * 64)
        assert bytes(unpack_tokens(restore.tokens)).decode() == f"<user>{TEXT}\n<assistant>Paris."
        record = (await proxy.wait_until_saved())[0]
        assert (record.source, record.cached_tokens, record.restored_tokens) == ("restored", reused, reused)
        assert record.saved_tokens > 0


@on_loop
async def test_unsavable_resident_is_evictable(tmp_path: Path) -> None:
    """Other requests may be waiting for its memory."""
    async with run_proxy(tmp_path, disk_budget_bytes=200_000) as proxy:
        await proxy.chat("word " * 800)
        record = (await proxy.wait_until_saved())[0]
        assert (record.outcome, record.saved_tokens) == ("ok", 0)
        (resident,) = (await proxy.status())["residents"]
        assert proxy.backend.calls["order"][-1] == [resident["id"]] and "save" not in proxy.backend.calls


@on_loop
async def test_unsavable_resident_does_not_block_other_saves(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, disk_budget_bytes=200_000) as proxy:
        root = namespace("f" * 64)
        proxy.backend.roots |= {"large": root, "small": root}
        proxy.backend.residents["large"] = bytes(4 * 4000)
        proxy.backend.residents["small"] = b"".join(number.to_bytes(4, "little") for number in range(200))
        while not (rows := proxy.index.segments()):
            await proxy.status()
        assert [row.end for row in rows] == [200]


@on_loop
async def test_reuse_mode_mismatch_returns_503(tmp_path: Path) -> None:
    """Each process has its own setting; under launchd they may differ."""
    async with run_proxy(tmp_path, reuse="exact") as proxy:
        response = await proxy.chat(TEXT)
        assert response.status == 503
        assert "reuse = exact and its backend does not" in await response.text()
        assert "generate" not in proxy.backend.calls


@on_loop
async def test_exact_mode_reuse_and_checkpoints_are_on_grid(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.layout = make_layout(grid=64, has_states=True, state_bytes=10)
        await proxy.chat(TEXT)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        response = await proxy.chat(**make_second_turn())
        reused = len(f"<user>{TEXT}\n<assistant>") // 64 * 64
        assert response.headers["X-Warmline-Cache"] == f"restored {reused}"
        checkpoints = [headers.get(HEADER_CHECKPOINTS, "") for headers in proxy.backend.calls["generate"]]
        assert checkpoints == [str(reused), ""]
        assert (
            "exact mode keeps and reuses multiples of 64 tokens" in (await proxy.wait_until_saved())[0].why_not_warmer
        )


@on_loop
async def test_reuse_off_sends_no_checkpoints(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, reuse="off") as proxy:
        proxy.backend.layout = make_layout(has_states=True, state_bytes=10)
        await proxy.chat(TEXT)
        assert HEADER_CHECKPOINTS not in proxy.backend.calls["generate"][0]


@on_loop
async def test_new_proxy_adopts_residents(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        prompt = f"<user>{TEXT}\n".encode()
        proxy.backend.roots["old"] = namespace("f" * 64)
        proxy.backend.residents["old"] = b"".join(byte.to_bytes(4, "little") for byte in prompt)
        response = await proxy.chat(TEXT)
        assert response.headers["X-Warmline-Cache"] == f"resident {len(prompt)}"


@on_loop
async def test_damaged_segment_is_quarantined_and_start_is_cold(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(TEXT)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        proxy.backend.restore_refusals = ["checksum"]
        response = await proxy.chat(**make_second_turn())
        assert (await response.json())["choices"][0]["message"]["content"] == "Paris."
        assert response.headers["X-Warmline-Cache"] == "cold 0"
        bad = proxy.backend.calls["restore"][0].chain[-1].id
        assert [row.id for row in proxy.index.quarantined()] == [bad]
        assert "checksum" in (await proxy.wait_until_saved())[0].why_not_warmer
        async with proxy.client.get(f"{proxy.url}/metrics") as metrics:
            assert 'warmline_quarantined_total{reason="checksum"} 1.0' in await metrics.text()


@on_loop
async def test_missing_resident_is_planned_again(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(TEXT)
        await proxy.wait_until_saved()
        proxy.backend.residents.clear()  # unnoticed by the proxy's view
        proxy.backend.gone_count = 1
        response = await proxy.chat(**make_second_turn())
        assert response.status == 200
        assert response.headers["X-Warmline-Cache"].startswith("restored ")
        proxy.backend.gone_count = 2
        assert (await proxy.chat(**make_second_turn())).headers["X-Warmline-Cache"] == "cold 0"


@on_loop
async def test_checkpoints_are_saved_at_planned_positions(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.layout = make_layout(has_states=True, state_bytes=64)
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXT}]
        await proxy.chat(messages=messages)
        system, end = len("<system>be brief\n"), len(f"<system>be brief\n<user>{TEXT}\n")
        assert proxy.backend.calls["generate"][0][HEADER_CHECKPOINTS] == f"{system},{end}"
        await proxy.wait_until_saved()
        saved = {each.position for each in proxy.backend.calls["save"][0].checkpoints}
        assert {system, end} <= saved
        proxy.backend.restart()
        messages[1:] = [{"role": "user", "content": "something else"}]
        assert (await proxy.chat(messages=messages)).headers["X-Warmline-Cache"] == f"restored {system}"


@on_loop
async def test_reuse_off_saves_nothing(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, reuse="off") as proxy:
        for _ in range(2):
            assert (await proxy.chat(TEXT)).headers["X-Warmline-Cache"] == "cold 0"
        await proxy.wait_until_saved()
        assert not proxy.backend.residents and not proxy.backend.calls["save"]
        assert proxy.index.totals().segments == 0


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_disconnect_cancels_and_saves_prefill(tmp_path: Path, stream: bool) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.ensure_future(proxy.chat(TEXT, stream=stream))
        await proxy.backend.holding.wait()
        asking.cancel()
        await asyncio.wait([asking])
        while not (records := await proxy.wait_until_saved()):
            pass  # until the proxy has noticed
        assert len(proxy.backend.calls["cancel"]) == 1
        assert proxy.backend.calls["save"], "prefilled rows are saved"
        assert records[0].outcome == "cancelled"
        assert (await proxy.status())["running"] == 0
        proxy.backend.hold_after = None
        assert (await proxy.chat(TEXT)).headers["X-Warmline-Cache"].startswith("resident")


@on_loop
async def test_full_queue_returns_429(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1, queue_count_max=1) as proxy:
        proxy.backend.hold_after = 0
        first = asyncio.ensure_future(proxy.chat())
        await proxy.backend.holding.wait()
        second = asyncio.ensure_future(proxy.chat())
        while (await proxy.status())["queued"] == 0:
            pass
        third = await proxy.chat()
        assert third.status == 429
        assert int(third.headers["Retry-After"]) > 0
        assert (await third.json())["error"]["code"] == "queue_full"
        proxy.backend.may_continue.set()
        assert [(await each).status for each in (first, second)] == [200, 200]


NO_REQUESTS = [b"", b"{", b"[]", b"null", b'"x"', b'{"model": 5}', b'{"a": "\xff"}', b"[" * 10_000]
REFUSED_BY_THE_BACKEND = b'{"stop": [5], "messages": []}'


@on_loop
async def test_bad_bodies_return_400(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        for body in (*NO_REQUESTS, REFUSED_BY_THE_BACKEND):
            async with proxy.client.post(f"{proxy.url}/v1/chat/completions", data=body) as response:
                assert response.status == 400, body[:80]
                assert (await response.json())["error"]["type"] == "invalid_request_error", body[:80]
            assert (await proxy.chat()).status == 200, body[:80]


@on_loop
async def test_chunked_and_compressed_bodies_are_read(tmp_path: Path) -> None:
    body, headers = json.dumps({"messages": [{"role": "user", "content": TEXT}]}).encode(), {"Content-Encoding": "gzip"}

    async def pieces() -> Any:
        for start in range(0, len(body), 50):
            yield body[start : start + 50]

    async with run_proxy(tmp_path) as proxy:
        for path in ("/v1/chat/completions/", "/v1/chat/completions?beta=true"):
            chunked = await proxy.client.post(proxy.url + path, data=pieces())
            packed = await proxy.client.post(proxy.url + path, data=gzip.compress(body), headers=headers)
            broken = await proxy.client.post(proxy.url + path, data=b"no gzip", headers=headers)
            assert [each.status for each in (chunked, packed, broken)] == [200, 200, 400], path
            assert "error" in await broken.json()


@on_loop
async def test_backend_down_returns_503(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, connect_timeout_s=0.1) as proxy:
        assert (await proxy.client.get(f"{proxy.url}/ready")).status == 200
        await proxy.stop_backend()
        response = await proxy.chat()
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert (await response.json())["error"]["code"] == "backend_unavailable"
        assert (await proxy.client.get(f"{proxy.url}/ready")).status == 503
        assert (await proxy.client.get(f"{proxy.url}/health")).status == 200


@on_loop
async def test_restarting_backend_is_waited_for(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(TEXT)
        await proxy.wait_until_saved()
        port = int(str(proxy.backend_url).rsplit(":", 1)[1])
        await proxy.stop_backend()
        asking = asyncio.ensure_future(proxy.chat(**make_second_turn()))
        await asyncio.sleep(0.05)  # the first dispatch finds no backend
        proxy.backend.restart()
        again, _ = await serve(proxy.backend.make_app(), port)
        assert (await asking).headers["X-Warmline-Cache"].startswith("restored")
        await again.cleanup()


@on_loop
async def test_saves_do_not_block_requests(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.saving_allowed.clear()
        for _ in range(2):
            assert (await proxy.chat(TEXT)).status == 200
        assert (await proxy.status())["settling"] == 2
        proxy.backend.saving_allowed.set()
        await proxy.wait_until_saved()
        assert proxy.index.totals().segments > 0


@on_loop
async def test_failed_save_leaves_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path) as proxy:
        with monkeypatch.context() as planted:
            planted.setattr(proxy.index, "begin_turn_save", lambda *_, **__: 1 / 0)
            assert (await proxy.chat(TEXT)).status == 200
            await proxy.wait_until_saved()
        assert (await proxy.chat(TEXT)).status == 200


@on_loop
async def test_concurrent_requests_list_residents_once_after_restart(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(TEXT)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        before = proxy.backend.calls["residents"].count("since=0")
        answers = await asyncio.gather(*(proxy.chat(f"{number} {TEXT}") for number in range(6)))
        assert {each.status for each in answers} == {200}
        assert proxy.backend.calls["residents"].count("since=0") == before + 1


@on_loop
async def test_stop_cancels_and_saves_running_requests(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.ensure_future(proxy.chat(TEXT))
        await proxy.backend.holding.wait()
        await proxy.stop_proxy()
        await asyncio.wait([asking])
        assert asking.exception() is not None, "half an answer must not look whole"
        assert len(proxy.backend.calls["cancel"]) == len(proxy.backend.calls["save"]) == 1
        proxy.index.flush()
        assert proxy.index.requests()[0].outcome == "cancelled"
        assert proxy.index.totals().tokens > 0


@on_loop
async def test_expect_100_continue(tmp_path: Path) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    async with run_proxy(tmp_path) as proxy:
        for expected, status in ((b"100-continue", b"200"), (b"100-Continue", b"200"), (b"\xed\xa0", b"417")):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
            lines = [
                b"POST /v1/chat/completions HTTP/1.1",
                b"Host: localhost",
                b"Expect: " + expected,
                b"Connection: close",
            ]
            writer.write(b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""]))
            if status == b"200":
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n", expected
                writer.write(body)
            answer = await reader.read()
            writer.close()
            assert answer.split()[1] == status, expected
            assert status == b"200" or b'"message":"The header Expect must be 100-continue' in answer


@on_loop
async def test_bad_admin_bodies_return_400(tmp_path: Path) -> None:
    bodies = (b'{"path": "\xff", "segment": "\xff", "session": "\xff"}', b'{"x": ' + b"[" * 100_000)
    async with run_proxy(tmp_path) as proxy:
        for path, body in product(("purge", "pin", "replay", "import", "texts"), bodies):
            url, headers = f"{proxy.url}/warmline/{path}", {"X-Warmline-Admin": "1"}
            async with proxy.client.post(url, data=body, headers=headers) as response:
                assert response.status == 400, (path, await response.text())
