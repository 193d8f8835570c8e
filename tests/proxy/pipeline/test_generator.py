"""What is saved of a prefill on its way."""

import asyncio
from typing import Any, cast

from support.proxy.fake_backend import layout
from support.proxy.harness import on_loop
from warmline_proxy.pipeline.generator import ProgressListener
from warmline_proxy.request.deadlines import RequestTimeouts
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import RequestLog
from warmline_proxy.tasks import BackgroundTasks


class Saver:
    """Takes down what it is to save, and fails."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def save_prefix(self, life: Request, until: int) -> bool:
        self.asked.append(until)
        return False


@on_loop
async def test_failed_prefix_save_waits_for_next_step() -> None:
    saver, background, nobody = Saver(), BackgroundTasks(), cast(Any, None)
    life = Request(RequestLog("chat"), nobody, RequestTimeouts())
    hearing = ProgressListener(life, nobody, cast(Any, saver), nobody, background, 512)
    hearing.on_started()
    life.listener = hearing
    for tokens in range(0, 2049, 64):
        hearing.on_prefilled(tokens)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert saver.asked == [512, 1024, 1536, 2048] and life.stored_tokens == 0


@on_loop
async def test_prefix_saves_end_on_grid() -> None:
    saver, background, nobody = Saver(), BackgroundTasks(), cast(Any, None)
    life = Request(RequestLog("chat"), nobody, RequestTimeouts(), layout=layout(grid=64))
    hearing = ProgressListener(life, nobody, cast(Any, saver), nobody, background, 100)
    hearing.on_started()
    for tokens in (64, 127, 128, 191, 300):
        hearing.on_prefilled(tokens)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert saver.asked == [128, 256]
