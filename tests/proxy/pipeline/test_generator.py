"""Prefixes saved during prefill."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from support.proxy.fake_backend import make_layout
from support.proxy.harness import on_loop
from warmline_proxy.pipeline.generator import Generator, ProgressListener
from warmline_proxy.request.deadlines import RequestTimeouts
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import RequestLog
from warmline_proxy.tasks import BackgroundTasks

UNUSED = cast(Any, None)


class Saver:
    """Records the prefixes that it should save, and fails."""

    def __init__(self) -> None:
        self.saved_until: list[int] = []

    async def save_prefix(self, request: Request, until: int) -> bool:
        self.saved_until.append(until)
        return False


def make_generator(saver: Saver, partial_save_tokens: int) -> Generator:
    config = SimpleNamespace(partial_save_tokens=partial_save_tokens, garbage_guard="off")
    background = BackgroundTasks()
    return Generator(cast(Any, config), cast(Any, saver), UNUSED, UNUSED, UNUSED, background)


@on_loop
async def test_failed_prefix_save_waits_for_next_step() -> None:
    saver = Saver()
    request = Request(RequestLog("chat"), UNUSED, RequestTimeouts())
    listener = ProgressListener(request, make_generator(saver, 512))
    listener.on_started()
    request.listener = listener
    for tokens in range(0, 2049, 64):
        listener.on_prefilled(tokens)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert saver.saved_until == [512, 1024, 1536, 2048] and request.stored_tokens == 0


@on_loop
async def test_prefix_saves_end_on_grid() -> None:
    saver = Saver()
    request = Request(RequestLog("chat"), UNUSED, RequestTimeouts(), layout=make_layout(grid=64))
    listener = ProgressListener(request, make_generator(saver, 100))
    listener.on_started()
    for tokens in (64, 127, 128, 191, 300):
        listener.on_prefilled(tokens)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert saver.saved_until == [128, 256]
