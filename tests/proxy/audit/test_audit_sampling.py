"""Audit selection: which requests are audited, when, and how many wait."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.proxy.fake_backend import make_first_logits, make_layout, pack_text
from warmline_common.storage.home import Home
from warmline_proxy.audit.auditor import WAITING_MAX, Auditor
from warmline_proxy.config import ProxyConfig
from warmline_proxy.metrics import ProxyMetrics


def make_auditor(folder: Path, fraction: float, recorded: list[Any]) -> Any:
    """Make an auditor whose task does not run."""
    config = ProxyConfig(home=Home(folder), audit_fraction=fraction)
    rest: dict[str, Any] = dict.fromkeys(["probe", "quarantine", "engine"])
    rest |= {"index": SimpleNamespace(record_audit=lambda *row: recorded.append(row)), "metrics": ProxyMetrics()}
    return Auditor(config=config, rng=random.Random(7), **rest)


def make_request(
    request_id: str,
    *,
    reuse: int = 10,
    collapse: str = "",
    outcome: str = "ok",
    length: int = 20,
    is_cacheable: bool = True,
    prompt: str = "",
) -> Any:
    """Make the fields of a request that the auditor reads."""
    log = SimpleNamespace(
        id=request_id,
        collapse=collapse,
        outcome=outcome,
        plan=SimpleNamespace(reuse=reuse),
        generation_result=SimpleNamespace(first=make_first_logits(-1.0)),
        session="conversation",
        arrived_monotonic=0.0,
        total_s=1.0,
    )
    text = (prompt or request_id).encode().ljust(length, b"x")
    rendered, layout = SimpleNamespace(tokens=pack_text(text)), make_layout()
    return SimpleNamespace(log=log, is_cacheable=is_cacheable, prompt=rendered, layout=layout, root=b"root")


def list_waiting(auditor: Any) -> list[str]:
    return [case.request_id for case in auditor._waiting]


def test_fraction_of_answered_warm_requests_is_audited(tmp_path: Path) -> None:
    auditor = make_auditor(tmp_path, 0.2, recorded := [])
    for number in range(1000):
        auditor.consider_request(make_request(str(number)))
        auditor.consider_request(make_request("cold", reuse=0))
        auditor.consider_request(make_request("cancelled", outcome="cancelled"))
        auditor.consider_request(make_request("purged", is_cacheable=False))
    dropped = len(recorded)
    assert len(list_waiting(auditor)) == WAITING_MAX and 150 < WAITING_MAX + dropped < 250
    assert not {"cold", "cancelled", "purged"} & set(list_waiting(auditor))
    assert {(audit, guard) for _, audit, guard in recorded} == {("abandoned", "")}


def test_full_queue_drops_newest_and_keeps_collapsed_first(tmp_path: Path) -> None:
    auditor = make_auditor(tmp_path, 1.0, recorded := [])
    for number in range(WAITING_MAX):
        auditor.consider_request(make_request(str(number)))
    auditor.consider_request(make_request("late"))
    auditor.consider_request(make_request("collapsed", collapse="digits"))
    auditor.consider_request(make_request("collapsed too", collapse="digits"))
    assert list_waiting(auditor)[:3] == ["collapsed", "collapsed too", "0"]
    assert len(list_waiting(auditor)) == WAITING_MAX
    assert [request_id for request_id, *_ in recorded] == ["late", str(WAITING_MAX - 1), str(WAITING_MAX - 2)]
    assert auditor.waiting_count == WAITING_MAX


def test_queue_is_bounded_in_bytes(tmp_path: Path) -> None:
    auditor = make_auditor(tmp_path, 1.0, recorded := [])
    for request_id in ("one", "two", "three"):
        auditor.consider_request(make_request(request_id, length=3 << 20))
    assert list_waiting(auditor) == ["one", "two"] and [request_id for request_id, *_ in recorded] == ["three"]


def test_prompt_is_audited_once_and_once_more_after_collapse(tmp_path: Path) -> None:
    auditor = make_auditor(tmp_path, 1.0, recorded := [])
    for request_id, collapse in (("one", ""), ("same", ""), ("collapsed", "digits"), ("too", "digits"), ("later", "")):
        auditor.consider_request(make_request(request_id, prompt="a turn", collapse=collapse))
    auditor.consider_request(make_request("other", prompt="another turn"))
    assert list_waiting(auditor) == ["collapsed", "one", "other"] and not recorded
    auditor.drop_waiting()
    auditor.consider_request(make_request("after purge", prompt="a turn"))
    assert list_waiting(auditor) == ["after purge"]
