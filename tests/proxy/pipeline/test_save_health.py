"""Health of saving: state, log lines and retries."""

import logging

import pytest

from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.pipeline.save_health import FILES, INDEX, SaveHealth


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> ProxyMetrics:
    return ProxyMetrics()


@pytest.fixture
def save_health(metrics: ProxyMetrics, clock: Clock) -> SaveHealth:
    return SaveHealth(metrics, retry_interval_s=5.0, clock=clock)


def test_failure_and_recovery_are_logged_once(
    save_health: SaveHealth, metrics: ProxyMetrics, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert save_health.state == "ok"
    for _ in range(3):
        save_health.record_failure(FILES, "ENOSPC", "writing failed")
    assert save_health.state == "segments/: No space left on device (ENOSPC)"
    exposed, _ = metrics.render_exposition()
    assert b"warmline_persistent 0.0" in exposed
    assert b'warmline_save_failures_total{reason="ENOSPC"} 3.0' in exposed
    clock.now_s += 60
    save_health.record_success(FILES)
    save_health.record_success(FILES)
    assert save_health.state == "ok" and b"warmline_persistent 1.0" in metrics.render_exposition()[0]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert "No space left on device" in caplog.messages[0] and "after 60 s" in caplog.messages[1]


def test_new_reason_is_logged(save_health: SaveHealth, caplog: pytest.LogCaptureFixture) -> None:
    save_health.record_failure(FILES, "ENOSPC", "")
    save_health.record_failure(FILES, "EIO", "")
    assert len(caplog.records) == 2 and "EIO" in save_health.state


def test_health_is_ok_after_all_parts_recover(save_health: SaveHealth, caplog: pytest.LogCaptureFixture) -> None:
    save_health.record_failure(FILES, "EROFS", "")
    save_health.record_failure(INDEX, "index", "the map is full")
    save_health.record_success(FILES)
    assert save_health.state == "index/: index"
    save_health.record_success(INDEX)
    assert save_health.state == "ok" and len(caplog.records) == 3


def test_one_retry_in_an_interval(save_health: SaveHealth, clock: Clock) -> None:
    assert save_health.can_save() and save_health.can_save()
    save_health.record_failure(FILES, "EIO", "")
    assert not save_health.can_save()
    clock.now_s += 5.0
    assert save_health.can_save() and not save_health.can_save()
    save_health.record_failure(FILES, "EIO", "")
    assert not save_health.can_save()
    save_health.record_success(FILES)
    assert save_health.can_save()
