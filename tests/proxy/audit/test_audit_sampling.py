"""Which requests are audited, when, and how many wait."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.proxy.fake_backend import first_logits, layout, packed
from warmline_common.storage.home import Home
from warmline_proxy.audit.auditor import WAITING_MAX, Auditor
from warmline_proxy.config import ProxyConfig
from warmline_proxy.metrics import ProxyMetrics


def auditor(folder: Path, fraction: float, noted: list[Any]) -> Any:
    """One that only gathers: nothing of it runs."""
    config = ProxyConfig(home=Home(folder), audit_fraction=fraction)
    rest: dict[str, Any] = dict.fromkeys(["recomputer", "condemner", "admission", "lives", "watchdog"])
    rest |= {"index": SimpleNamespace(note_audit=lambda *what: noted.append(what)), "metrics": ProxyMetrics()}
    return Auditor(config=config, rng=random.Random(7), **rest)


def life(
    name: str, *, reuse: int = 10, collapse: str = "", outcome: str = "ok", length: int = 20, is_kept: bool = True
) -> Any:
    """As much of a request as is looked at."""
    trace = SimpleNamespace(
        id=name,
        collapse=collapse,
        outcome=outcome,
        plan=SimpleNamespace(reuse=reuse),
        settled=SimpleNamespace(first=first_logits(-1.0)),
    )
    prompt = SimpleNamespace(tokens=packed(b"x" * length))
    return SimpleNamespace(trace=trace, is_kept=is_kept, prompt=prompt, layout=layout(), root=b"root")


def waiting(found: Any) -> list[str]:
    return [case.request_id for case in found._waiting]


def test_chance_chooses_a_share_of_the_warm_ones_that_were_answered(tmp_path: Path) -> None:
    found = auditor(tmp_path, 0.2, noted := [])
    for number in range(1000):
        found.consider(life(str(number)))
        found.consider(life("cold", reuse=0))
        found.consider(life("cancelled", outcome="cancelled"))
        found.consider(life("purged", is_kept=False))
    dropped = len(noted)
    assert len(waiting(found)) == WAITING_MAX and 150 < WAITING_MAX + dropped < 250
    assert not {"cold", "cancelled", "purged"} & set(waiting(found))
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
    assert f"warmline_audits_waiting {WAITING_MAX}" in found._metrics.exposition()[0].decode()


def test_what_waits_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    found = auditor(tmp_path, 1.0, noted := [])
    for name in ("one", "two", "three"):
        found.consider(life(name, length=3 << 20))
    assert waiting(found) == ["one", "two"] and [name for name, *_ in noted] == ["three"]
