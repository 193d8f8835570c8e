"""Writer thread: it goes on whatever it meets."""

import threading
from concurrent.futures import CancelledError

import pytest

from warmline_proxy.store.errors import IndexStoreError
from warmline_proxy.store.writer import WriterThread

WAIT_S = 20


def test_failed_tick_is_logged_and_writer_continues(caplog: pytest.LogCaptureFixture) -> None:
    ticked = threading.Event()

    def tick() -> None:
        if not ticked.is_set():
            ticked.set()
            raise ZeroDivisionError("planted")

    writer = WriterThread(tick, 0.01)
    assert ticked.wait(WAIT_S)
    assert writer.submit(lambda: 1).result(WAIT_S) == 1
    writer.close()
    assert "planted" in caplog.text


def test_write_fails_alone_and_can_be_cancelled() -> None:
    writer = WriterThread(lambda: None, 1000.0)
    go_on = threading.Event()
    first, second, third = (writer.submit(work) for work in (lambda: go_on.wait(WAIT_S), lambda: 2, lambda: 1 / 0))
    assert second.cancel()
    go_on.set()
    assert first.result(WAIT_S) is True
    with pytest.raises(ZeroDivisionError):
        third.result(WAIT_S)
    with pytest.raises(CancelledError):
        second.result(WAIT_S)
    writer.close()
    with pytest.raises(IndexStoreError, match="closed"):
        writer.submit(lambda: 1)
