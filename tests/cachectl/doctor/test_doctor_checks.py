"""Checks of `cachectl doctor`: each common problem is found, with its fix; a healthy machine has none."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.cachectl.homes import read_json, run_cachectl
from warmline_cachectl.doctor import facts as gathering
from warmline_cachectl.doctor.checks import CHECKS, FAIL, OK, WARN, run_checks
from warmline_cachectl.doctor.facts import Facts, IndexFacts, MachineFacts, SettingsFacts, gather
from warmline_common.settings.table import get_default
from warmline_common.storage.file_lock import process_lock
from warmline_common.storage.home import Home
from warmline_proxy.home_lock import home_lock
from warmline_proxy.store.rows import Divergence, IndexFinding, RequestRecord, Totals

GB = 10**9
NOW = 1_000_000.0
TOTALS = Totals(
    segments=3,
    checkpoints=0,
    sessions=1,
    quarantined=0,
    tokens=300,
    bytes_segments=GB,
    bytes_checkpoints=0,
    bytes_quarantined=0,
    bytes_writing=0,
    bytes_doomed=0,
    bytes_index=0,
)
ENGINE = {"model": "m", "failure": "", "memory_budget_bytes": 64 * GB}
STATUS = {
    "backend": "",
    "engine": ENGINE,
    "persistence": "ok",
    "disk_budget_bytes": 50 * GB,
    "totals": msgspec.to_builtins(TOTALS),
}
MACHINE = MachineFacts(
    system="darwin",
    memory_bytes=128 * GB,
    disk_bytes_free=500 * GB,
    disk_bytes=1000 * GB,
    descriptors_soft=256,
    descriptors_hard=10_240,
    now=NOW,
    wired_limit_mb="0\n",
    power="System-wide power settings:\n SleepDisabled\t\t0\n sleep                0 (sleep prevented by powerd)\n",
    agents="PID\tStatus\tLabel\n120\t0\tlocal.warmline.proxy\n121\t-9\tlocal.warmline.backend\n-\t78\tother\n",
)
SETTINGS = SettingsFacts(
    host="127.0.0.1",
    port=8026,
    backend_port=8025,
    reuse="fast",
    lan=False,
    allowed_hosts="",
    key_in_settings=False,
    disk_budget_bytes=50 * GB,
    on_loopback=True,
)
WELL = Facts(
    home=Path("/home/of/it"),
    has_home=True,
    lock_holder="120",
    proxy_url="http://127.0.0.1:8026",
    status=STATUS,
    index=IndexFacts(totals=TOTALS, roots={"m": 1}),
    settings=SETTINGS,
    machine=MACHINE,
)


def make_model(name: str, stage: str, reason: str = "", kv_bytes: int = 0) -> dict[str, Any]:
    return {"name": name, "stage": stage, "reason": reason, "kv_bytes": kv_bytes}


def vary(**changes: Any) -> Facts:
    """Vary the facts of a healthy machine; `machine__x` is a field of `machine`, and so on."""
    facts = WELL
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        changed = replace(getattr(facts, part), **{field: value}) if part else value
        facts = replace(facts, **{part or name: changed})
    return facts


def make_records(count: int, cause: str = "", why: str = "", at: float = 0.0) -> list[RequestRecord]:
    parting = Divergence(at=1, begins=0, stored=b"", prompt=b"", cause=cause) if cause else None
    return [
        RequestRecord(
            id=str(number), at=at, endpoint="chat", client_model="m", outcome="ok", source="cold", prompt_tokens=100,
            cached_tokens=10, why_not_warmer=why, parting=parting,
        )
        for number in range(count)
    ]  # fmt: skip


def vary_linux(**changes: Any) -> Facts:
    return vary(machine__system="linux", machine__agents="", **changes)


FINDINGS: dict[str, tuple[Facts, str, str, str, str]] = {  # what: facts, check, status, seen, mend
    "open modes": (vary(open_modes=["secret (644)"]), "modes", FAIL, "secret (644)", "chmod -R go-rwx /home/of/it"),
    "a silent holder": (vary(status=None), "lock", FAIL, "process 120 holds", "ps -p 120"),
    "no proxy": (vary(status=None, proxy_error="no proxy runs"), "proxy", WARN, "no proxy runs", "warmline serve"),
    "stale files": (vary(run_files={"proxy.pid": 7}), "run files", WARN, "proxy.pid names process 7", "serve"),
    "another program": (
        vary(foreign_run_files={"backend-a.pid": 7}),
        "run files", WARN, "backend-a.pid names process 7, which is another program", "serve",
    ),
    "no backend": (vary(status=STATUS | {"backend": "loading"}), "backend", FAIL, "loading", "warmline doctor"),
    "a failed one": (
        vary(status=STATUS | {"engine": ENGINE | {"failure": "no memory"}}),
        "backend", FAIL, "no memory", "warmline doctor",
    ),
    "a failed one of several": (
        vary(status=STATUS | {"models": [make_model("a", "loaded"), make_model("b", "failed", "no config.json")]}),
        "backend", FAIL, "a: loaded, b: failed", "warmline models ls",
    ),
    "one of several that never fits": (
        vary(status=STATUS | {"models": [make_model("a", "starting", "reads"), make_model("b", "unloaded", "large")]}),
        "backend", WARN, "a: starting, b: unloaded; can't be loaded: b", "warmline models ls",
    ),
    "taken ports": (vary(status=None, ports_taken=[8026]), "ports", FAIL, "8026 taken", "--port"),
    "nothing saved": (vary(status=STATUS | {"persistence": "ENOSPC"}), "saving", FAIL, "ENOSPC", "resilience.md"),
    "a full disk": (vary(machine__disk_bytes_free=GB), "disk", FAIL, "nearly full: 1.0 GB free", "cachectl gc --to-gb"),
    "a large budget": (
        vary(machine__disk_bytes_free=60 * GB, status=STATUS | {"disk_budget_bytes": 90 * GB}),
        "disk", WARN, "budget of 90.0 GB is more than there is", "disk_budget_gb",
    ),
    "no index": (vary(index__problem="damaged"), "index", FAIL, "damaged", "--repair"),
    "findings": (
        vary(index__findings=[IndexFinding(what="tree", id="", detail="")] * 2),
        "index", FAIL, "2 findings: tree 2", "--repair",
    ),
    "quarantine": (
        vary(index__totals=msgspec.structs.replace(TOTALS, quarantined=1, bytes_quarantined=5)),
        "quarantine", WARN, "1 file, 5 B", "inspect",
    ),
    "no reuse": (vary(settings__reuse="off"), "reuse", WARN, "off", "reuse = fast"),
    "times in prompts": (
        vary(index__records=make_records(20, cause="timestamp")), "hit rate", WARN, "10% of", 'stabilize = "times"'
    ),
    "other misses": (
        vary(index__records=make_records(20, why="evicted at token 81")),
        "hit rate", WARN, "most often: evicted at token N", "explain",
    ),
    "several roots": (vary(index__roots={"m": 2}), "fingerprint", WARN, "m is stored under 2 identities", "purge"),
    "unreadable keys": (vary(keys_problem="keys.json is no JSON"), "keys", FAIL, "no JSON", "cachectl key"),
    "an open door": (
        vary(settings__on_loopback=False, settings__host="0.0.0.0"), "keys", FAIL, "there is no client key", "--lan"
    ),
    "any host": (vary(settings__allowed_hosts="a,*"), "allowed_hosts", WARN, "any name", "name the names"),
    "the future": (
        vary(index__records=make_records(1, at=NOW + 7200)), "clock", WARN, "2h in the future", "set the clock",
    ),
    "large logs": (vary(log_bytes=GB), "logs", WARN, "1.0 GB", "delete"),
    "few descriptors": (vary(machine__descriptors_hard=256), "descriptors", WARN, "at most 256", "ulimit -n"),
    "much memory": (vary(machine__memory_bytes=70 * GB), "memory", WARN, "64.0 GB for", "memory_budget_gb"),
    "sleep": (vary(machine__power=" sleep   10\n"), "sleep", WARN, "after 10 minutes", "pmset"),
    "agents": (
        vary(machine__agents="-\t78\tlocal.warmline.proxy\n"),
        "launchd", FAIL, "local.warmline.proxy", "warmline launchd logs",
    ),
    "reference BLAS": (vary_linux(), "BLAS", WARN, "no OpenBLAS", "libopenblas0-pthread"),
}  # fmt: skip


@pytest.mark.parametrize("what", FINDINGS)
def test_each_problem_is_found_with_remedy(what: str) -> None:
    facts, name, status, seen, mend = FINDINGS[what]
    found = run_checks(facts)[name]
    assert (found.status, seen in found.seen, mend in found.mend) == (status, True, True), found


@pytest.mark.parametrize(
    ("facts", "name", "mend"),
    [
        (vary(status=None), "proxy", "start it: `warmline serve --home /home/of/it`"),
        (vary(index__problem="damaged"), "index", "`cachectl verify --repair --home /home/of/it`"),
        (vary(index__records=make_records(20, cause="damaged")), "hit rate", "`cachectl verify --deep --home /home"),
        (vary(home=Path(get_default("home")), status=None), "proxy", "start it: `warmline serve`"),
    ],
)  # fmt: skip
def test_remedies_act_on_examined_home(facts: Facts, name: str, mend: str) -> None:
    assert run_checks(facts)[name].mend.startswith(mend)


def test_healthy_facts_give_no_finding() -> None:
    checks = run_checks(WELL)
    assert {name: check.seen for name, check in checks.items() if check.status != OK} == {}
    assert all(not check.mend for check in checks.values())
    assert len(checks) >= 20


@pytest.mark.parametrize(
    ("facts", "name", "seen"),
    [
        (vary(index__problem="no index in /x"), "index", "nothing was ever stored"),
        (vary(index__records=make_records(5)), "hit rate", "10% of the prompts of the last 5 requests"),
        (vary(index__roots={"m": 2}, keys=1), "fingerprint", "nothing stored belongs to"),
        (vary(settings__on_loopback=False, keys=2), "keys", "2 client keys; plain HTTP"),
        (vary(settings__on_loopback=False, settings__lan=True), "keys", "plain HTTP"),
        (vary(machine__descriptors_soft=-1, machine__descriptors_hard=-1), "descriptors", "no limit"),
        (vary(machine__wired_limit_mb="1024"), "wired limit", "the GPU may have 1.1 GB"),
        (vary_linux(machine__has_openblas=True), "BLAS", "OpenBLAS is there"),
        (vary_linux(machine__has_gpu=True, machine__memory_bytes=70 * GB), "memory", "64.0 GB"),
        (
            vary(
                status=STATUS | {"models": [make_model("a", "loaded", "", GB), make_model("b", "loaded", "", 2 * GB)]}
            ),
            "memory",
            "1.0 GB for conversations of a and 2.0 GB for conversations of b, of",
        ),
    ],
)
def test_harmless_facts_give_no_finding(facts: Facts, name: str, seen: str) -> None:
    found = run_checks(facts)[name]
    assert found.status == OK and seen in found.seen, found


def test_inapplicable_checks_are_omitted() -> None:
    names = run_checks(vary_linux(status=None, machine__has_gpu=True)).keys()
    assert not names & {"backend", "saving", "memory", "sleep", "launchd", "wired limit", "BLAS", "allowed_hosts"}
    assert "ports" in names and len(CHECKS) > len(names)


# --- gathering ---


def test_facts_of_real_home(home: Home) -> None:
    (home.root / "secret").write_text("x")
    (home.root / "secret").chmod(0o644)
    (home.logs / "proxy.log").write_text("12345")
    home.pid_file("proxy").write_text("999999999")
    (home.run / "proxy.json").write_text('{"pid": 999999999, "url": "http://127.0.0.1:9"}')
    with socket.socket() as taken, home_lock(home):
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        (home.root / "warmline.toml").write_text(f'backend_port = {port}\nreuse = "exact"\nlan = true\n')
        facts = gather(home)
    assert facts.open_modes == ["secret (644)"] and facts.run_files == {"proxy.pid": 999999999}
    assert (facts.log_bytes, facts.lock_holder) == (5, str(os.getpid()))
    assert facts.status is None and "no proxy answers at http://127.0.0.1:9" in facts.proxy_error
    assert (facts.settings.port, facts.settings.backend_port, facts.ports_taken) == (9, port, [port])
    assert (facts.settings.reuse, facts.settings.lan, facts.settings.on_loopback) == ("exact", True, False)
    assert facts.index.findings and facts.index.roots == {"model-a": 1} and len(facts.index.records) == 2
    assert facts.machine.memory_bytes > 0 and facts.machine.disk_bytes >= facts.machine.disk_bytes_free


def test_stale_and_foreign_pid_files_of_each_backend_are_found(home: Home) -> None:
    stand_in = "import sys; print(flush=True); sys.stdin.read()"
    own = [sys.executable, "-c", stand_in, "-m", "warmline_backend"]
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other,
        subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as backend,
    ):
        assert backend.stdout is not None and backend.stdout.readline() == b"\n"
        for instance, pid in {"": other.pid, "large": backend.pid, "qwen3.5": 999999999}.items():
            Home(home.root, instance).pid_file("backend").write_text(f"{pid}\n")
        facts = gather(home)
        for process in (other, backend):
            assert process.stdin is not None
            process.stdin.close()
    assert facts.run_files == {"backend-qwen3.5.pid": 999999999}
    assert facts.foreign_run_files == {"backend.pid": other.pid}


def test_announced_ports_precede_settings(home: Home) -> None:
    (home.root / "warmline.toml").write_text("port = 18026\n")
    assert (gathering._read_settings(home).port, gathering._read_settings(home).backend_port) == (18026, 8025)
    (home.run / "proxy.json").write_text('{"pid": 999999999, "url": "http://[::1]:9001"}')
    (home.run / "backend.json").write_text('{"pid": 999999999, "port": 9002}')
    assert (gathering._read_settings(home).port, gathering._read_settings(home).backend_port) == (9001, 9002)
    (home.run / "proxy.json").write_text('{"pid": 999999999, "url": "http://127.0.0.1:x"}')
    assert gathering._read_settings(home).port == 18026, "it names no port"


def test_own_backend_is_no_other_program(home: Home) -> None:
    with socket.socket() as taken, process_lock(home.backend_lock):
        taken.bind(("127.0.0.1", 0))
        (home.run / "backend.json").write_text(json.dumps({"pid": os.getpid(), "port": taken.getsockname()[1]}))
        assert gathering._find_taken_ports(home, replace(gathering._read_settings(home), port=9)) == []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        settings = replace(gathering._read_settings(home), port=9, backend_port=taken.getsockname()[1])
        assert gathering._find_taken_ports(home, settings) == [settings.backend_port]


@pytest.mark.parametrize(
    ("bound", "on_loopback"), [("0.0.0.0", False), ("127.0.0.1", True), ("", False)], ids=["--lan", "--no-lan", "older"]
)
def test_running_proxy_address_precedes_settings_file(home: Home, bound: str, on_loopback: bool) -> None:
    (home.root / "warmline.toml").write_text("lan = true\n")
    found = gathering._read_settings(home, STATUS | {"host": bound})
    assert (found.host, found.on_loopback) == (bound or "127.0.0.1", on_loopback)


def test_doctor_command_exit_code_and_output(home: Home) -> None:
    done = run_cachectl(home, "doctor", columns=80)
    assert done.returncode == 1 and "→ start it: `warmline serve" in done.stdout and "quarantine" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_healthy_home_exits_with_0(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmline_cachectl.commands.doctor.gather", lambda _: WELL)
    assert read_json(home, "doctor")["findings"] == 0
    assert "all is well" in run_cachectl(home, "doctor").stdout


def test_missing_system_command_is_ignored() -> None:
    assert gathering._run_command("no-such-command-anywhere") == ""
    assert gathering._run_command("false") == ""
