"""HTTP contract of the backend as far as nothing else tests it: refusals, the proxy's headers, unread streams."""

import asyncio
import re
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from support.backend.live_backend import (
    BODY,
    ENDLESS,
    SECRET,
    WAIT_S,
    ChunkGate,
    LiveBackend,
    read_result,
    read_until,
    wait_until,
    with_backend,
)
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.kv_cache import kv
from warmline_backend.kv_cache.chunk_draft import OutOfMemoryError
from warmline_backend.prompt.render_limits import RenderCancelledError, RenderLimits
from warmline_backend.request.params import GenerationParams
from warmline_backend.scheduler.capacity import KvTooLargeError
from warmline_backend.server import prompt_store, routes
from warmline_backend.server.service import INLINE_RENDER_BYTES_MAX, LARGE_BODY_BYTES_MIN, RENDER_THREADS
from warmline_common.protocol.messages import (
    HEADER_FOLLOW,
    HEADER_PROMPT,
    HEADER_REQUEST,
    HEADER_RESIDENT,
    HEADER_REUSE,
    RESIDENT_IDS_MAX,
    MemoryShare,
    MemoryShareReply,
    PromptRequest,
    ResidentsReply,
)

FolderOf = Callable[..., Path]


def test_evicted_prompt_returns_410(tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_store, "PROMPTS_MAX", 1)

    async def work(backend: LiveBackend) -> None:
        first, second = await backend.render_prompt(), await backend.render_prompt()
        async with backend.start_generation("a", first) as response:
            assert response.status == 410 and "it is too old" in await response.text()
        async with backend.start_generation("a", second) as response:
            assert (await read_result(response)).finish == "length"

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_prompt_over_capacity_returns_400(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        wanted = PromptRequest(request_id="p", endpoint="chat", body=ENDLESS)
        for path, body in (("/kv/prompts", wanted), ("/v1/chat/completions", ENDLESS)):
            status, reply = await backend.request_json("POST", path, body)
            error = reply["error"]
            assert (status, error["code"]) == (400, "kv_memory_exceeded"), reply
            assert "takes 0.3 MB, the memory budget is 0.2 MB" in error["message"]
            assert "shorten the prompt or raise --memory-budget-gb" in error["message"]
        assert (await backend.request_json("POST", "/v1/chat/completions", BODY))[0] == 200
        same = GenerationRequest("a", [1] * 199, GenerationParams(max_tokens=50_000), listener=print)
        with pytest.raises(KvTooLargeError) as refused:
            await backend.run_on_engine(lambda scheduler: scheduler.submit(same))
        assert str(refused.value) == error["message"], "the engine would have said the same"

    with_backend(tiny_folder("llama"), tmp_path, work, budget=180_000)


@pytest.mark.parametrize(
    ("budget", "code", "fault"),
    [
        (1 << 30, "context_length_exceeded", r"maximum context length is 100000 tokens. .* more than \d{6} tokens"),
        (180_000, "kv_memory_exceeded", r"the KV of more than \d+ prompt tokens .* takes more than \d+.* MB"),
    ],
)
def test_prompt_far_too_long_is_refused_before_it_is_tokenized(
    tiny_folder: FolderOf, tmp_path: Path, budget: int, code: str, fault: str
) -> None:
    async def work(backend: LiveBackend) -> None:
        for endpoint, body in (("chat", make_chat("x" * 1_500_000)), ("completion", {"prompt": "x" * 1_500_000})):
            request = PromptRequest(request_id="p", endpoint=endpoint, body=body)
            status, reply = await backend.request_json("POST", "/kv/prompts", request)
            assert (status, reply["error"]["code"]) == (400, code)
            assert re.search(fault, reply["error"]["message"]), reply
        assert (await backend.request_json("POST", "/v1/chat/completions", BODY))[0] == 200

    with_backend(tiny_folder("llama"), tmp_path, work, budget=budget)


def make_chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def test_large_prompts_end_with_their_clients(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile they delay no other prompt, whether it is rendered on the loop or on a thread."""
    check_text, large = RenderLimits.check_text, b"x" * LARGE_BODY_BYTES_MIN
    began, cancelled = threading.Semaphore(0), threading.Semaphore(0)

    def wait_for_cancellation(limits: RenderLimits, text: str, *arguments: Any) -> None:
        if len(text) < len(large):
            return check_text(limits, text, *arguments)
        try:
            with subprocess.Popen(["sleep", str(WAIT_S)]) as process, limits.cancellation.kill_on_cancel(process):
                began.release()
                process.wait()
        except RenderCancelledError:
            cancelled.release()
            raise

    monkeypatch.setattr(RenderLimits, "check_text", wait_for_cancellation)

    async def work(backend: LiveBackend) -> None:
        bodies = [make_chat(f"{number}{large.decode()}") for number in range(RENDER_THREADS + 1)]
        sent = [asyncio.ensure_future(backend.render_prompt(body)) for body in bodies]
        for _ in range(RENDER_THREADS):
            assert await asyncio.to_thread(began.acquire, timeout=WAIT_S)
        for body in (make_chat("a"), make_chat("a" * 2 * INLINE_RENDER_BYTES_MAX)):
            assert (await backend.render_prompt(body)).tokens
        for task in sent:
            task.cancel()
        await asyncio.wait(sent)
        for _ in range(RENDER_THREADS):
            assert await asyncio.to_thread(cancelled.acquire, timeout=WAIT_S)
        assert not began.acquire(blocking=False), "the one that waited is not begun"

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_prompt_without_memory_for_its_chunks_returns_400(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as for a prompt over capacity: the proxy does not dispatch it again."""

    async def work(backend: LiveBackend) -> None:
        prompt = await backend.render_prompt()
        with monkeypatch.context() as patch:
            patch.setattr(kv, "compute_chunk", find_no_memory)
            status, reply = await backend.request_json("POST", "/v1/chat/completions", BODY)
            assert (status, reply["error"]["code"]) == (400, "kv_memory_exceeded")
            async with backend.start_generation("a", prompt) as response:
                text = await response.text()
        assert '"type":"invalid_request_error"' in text and '"code":"kv_memory_exceeded"' in text
        assert "a chunk of 32 tokens takes about" in text and '"finish":"error"' in text
        assert (await backend.request_json("POST", "/v1/chat/completions", BODY))[0] == 200

    def find_no_memory(*_: object) -> None:
        raise OutOfMemoryError("out of memory")

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_follower_reuses_leaders_prefill(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = ChunkGate(monkeypatch)

    async def work(backend: LiveBackend) -> None:
        prompt = await backend.render_prompt()
        headers = {HEADER_PROMPT: prompt.prompt_id, HEADER_REUSE: "198"}

        def follower(name: str, leader: str) -> "asyncio.Task[tuple[int, bytes]]":
            async def ask() -> tuple[int, bytes]:
                own = {**headers, HEADER_REQUEST: name, HEADER_FOLLOW: leader}
                async with backend.send("POST", "/v1/chat/completions", **own) as response:
                    return response.status, await response.read()

            return asyncio.ensure_future(ask())

        async with backend.start_generation("leader", prompt) as response:
            await chunks.wait_for_chunk()
            following = follower("follower", "leader")
            await wait_until(lambda: not backend.engine._commands.empty())
            chunks.open_for_all()
            assert (await read_result(response)).finish == "length"
        status, body = await following
        assert status == 200 and b'"cached_tokens":198' in body
        assert body.index(b": prefill 198/199") < body.index(b": started"), "it hears of its leader while it waits"
        status, body = await follower("late", "leader")
        assert status == 200 and b'"cached_tokens":198' in body, "from the resident that its leader left"

    with_backend(tiny_folder("llama"), tmp_path, work, step=64)


def test_follower_continues_cancelled_leaders_prefill(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = ChunkGate(monkeypatch)

    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("leader", await backend.render_prompt()):
            await chunks.wait_for_chunk()
            asking = await start_follower(backend)
            cancelling = asyncio.ensure_future(backend.request_json("DELETE", "/requests/leader"))
            await wait_until(lambda: backend.engine._commands.qsize() == 2)
            chunks.open_for_all()
            assert (await cancelling)[0] == 200
        status, reply = await asking
        assert (status, reply["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 64)

    with_backend(tiny_folder("llama"), tmp_path, work, step=64)


def test_orphaned_follower_returns_503_leaderless(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader's step fails, and leaves no KV to go on with."""
    chunks = ChunkGate(monkeypatch)

    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("leader", await backend.render_prompt()):
            await chunks.wait_for_chunk()
            asking = await start_follower(backend)
            chunks.release()
            await chunks.wait_for_chunk()
            monkeypatch.setattr(kv, "compute_chunk", lambda *_: 1 / 0)
            chunks.open_for_all()
            status, reply = await asking
        assert (status, reply["error"]["code"]) == (503, "leaderless")

    with_backend(tiny_folder("llama"), tmp_path, work, step=64)


async def start_follower(backend: LiveBackend) -> "asyncio.Future[tuple[int, Any]]":
    """Send a request that follows the request "leader"; returns when the engine is to queue it next."""
    headers = {HEADER_FOLLOW: "leader", HEADER_REUSE: "198"}
    asking = asyncio.ensure_future(backend.request_json("POST", "/v1/chat/completions", BODY, **headers))
    await wait_until(lambda: not backend.engine._commands.empty())
    return asking


def test_leader_and_resident_together_return_400(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        headers = {HEADER_FOLLOW: "leader", HEADER_RESIDENT: "resident", HEADER_REUSE: "10"}
        status, reply = await backend.request_json("POST", "/v1/chat/completions", BODY, **headers)
        assert status == 400 and "not from both" in reply["error"]["message"]

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_reader_that_takes_nothing_is_disconnected(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "SEND_TIMEOUT_S", 0.05)

    async def work(backend: LiveBackend) -> None:
        prompt = await backend.render_prompt(ENDLESS)
        loop, reader = asyncio.get_running_loop(), socket.socket()
        backend.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the connection's, too
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.setblocking(False)
        await loop.sock_connect(reader, backend.listening.getsockname())
        head = {"Host": "x", "Authorization": f"Bearer {SECRET}", HEADER_PROMPT: prompt.prompt_id, HEADER_REQUEST: "a"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        await loop.sock_sendall(reader, f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n".encode())
        await wait_until(lambda: backend.service.inflight.request_ids == ["a"])
        async with asyncio.timeout(WAIT_S):
            await backend.service.inflight.wait_until_empty()
            while await backend.run_on_engine(lambda scheduler: scheduler.running_count):
                pass
        reader.close()
        assert backend.service.list_residents(with_ids=False).residents[0].tokens < 50_000

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_started_comment_comes_first(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("a", await backend.render_prompt()) as response:
            assert await read_until(response, b":") == b": started\n"
            assert (await read_result(response)).finish == "length"

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_residents_route_lists_changes_and_named_residents(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        async def list_residents(query: str) -> ResidentsReply:
            status, body = await backend.request_json("GET", f"/kv/residents{query}")
            assert status == 200
            return convert(body, ResidentsReply)

        prompt = await backend.render_prompt(BODY)
        for name in ("a", "b"):
            async with backend.start_generation(name, prompt) as response:
                assert (await read_result(response)).resident
        every = await list_residents("?ids=1")
        first, second = every.residents
        assert every.since == 0 and first.ids and second.ids
        assert (await list_residents(f"?ids={second.id},none")).residents == [second]
        assert await backend.service.delete_resident(first.id)
        changes = await list_residents(f"?since={every.revision}")
        assert (changes.since, changes.residents, changes.removed) == (every.revision, [], [first.id])
        complete = await list_residents("?since=0")
        assert [(each.id, each.ids) for each in complete.residents] == [(second.id, None)]
        for query in ("?since=x", f"?ids={'a,' * RESIDENT_IDS_MAX}b"):
            assert (await backend.request_json("GET", f"/kv/residents{query}"))[0] == 400

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_memory_share_is_set_and_checked(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        share = MemoryShare(kv_bytes=5_000_000, usable_bytes=1 << 30)
        status, reply = await backend.request_json("PUT", "/kv/memory", share)
        assert status == 200
        assert convert(reply, MemoryShareReply) == MemoryShareReply(boot="boot", generation=0, kv_bytes=5_000_000)
        for field in ("kv_bytes", "usable_bytes"):
            wrong = {"kv_bytes": 1, "usable_bytes": 1, field: -1}
            status, reply = await backend.request_json("PUT", "/kv/memory", wrong)
            assert (status, reply["error"]["param"]) == (400, field)
        assert backend.service.read_status().memory_budget_bytes == 5_000_000

    with_backend(tiny_folder("llama"), tmp_path, work)
