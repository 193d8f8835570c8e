"""Commands that each action gives launchctl or systemctl, and their documentation."""

import json
import os
import plistlib
import re
import shlex
import socket
from pathlib import Path

import pytest

from support.run.fake_managers import FakeUser
from warmline_common.storage.file_lock import process_lock
from warmline_run.services import systemd
from warmline_run.services.service import parse_arguments


def test_install_bootstraps_both_and_replaces_loaded_ones(mac: FakeUser) -> None:
    domain = f"gui/{os.getuid()}"
    labels = {role: f"com.warmline.{role}" for role in ("proxy", "backend")}
    files = {role: str(mac.root / "Library" / "LaunchAgents" / f"{label}.plist") for role, label in labels.items()}
    boot = [
        call
        for role in ("backend", "proxy")
        for call in (["enable", f"{domain}/{labels[role]}"], ["bootstrap", domain, files[role]])
    ]
    mac.install("--wait-s", "0")
    assert mac.calls == boot
    assert {Path(file).stat().st_mode & 0o777 for file in files.values()} == {0o600}
    assert (mac.home / "logs" / "proxy.stderr").stat().st_mode & 0o777 == 0o600
    mac.install("--wait-s", "0", "--disk-budget-gb", "3")
    out = [["bootout", f"{domain}/{labels[role]}"] for role in ("proxy", "backend")]
    assert mac.calls == [*boot, *out, *boot]
    assert (
        parse_arguments(plistlib.loads(Path(files["proxy"]).read_bytes())["ProgramArguments"])["disk_budget_gb"]
        == "3.0"
    )
    mac.run("uninstall")
    assert mac.calls == [*boot, *out, *boot, *out]
    assert not any(Path(file).exists() for file in files.values()) and (mac.home / "logs").is_dir()
    assert "no launch agents are installed" in mac.run("uninstall").output


def test_systemd_install_enables_and_starts(linux: FakeUser) -> None:
    linux.install("--wait-s", "0", "--name", "second")
    proxy, backend = "warmline-second-proxy.service", "warmline-second-backend.service"
    start = [call for unit in (backend, proxy) for call in (["daemon-reload"], ["enable", unit], ["restart", unit])]
    start.insert(0, ["daemon-reload"])  # whether there is a manager at all
    assert linux.calls == start
    linux.run("restart", "proxy", "--name", "second", "--wait-s", "0")
    assert linux.calls[len(start) :] == [["restart", proxy]]
    linux.run("uninstall", "--name", "second")
    assert linux.calls[len(start) + 1 :] == [
        ["disable", "--now", proxy],
        ["disable", "--now", backend],
        ["daemon-reload"],
    ]


def test_status_reports_each_process(mac: FakeUser) -> None:
    found = mac.status(code=1)
    assert not found["installed"] and found["reason"] == "not installed"
    mac.install("--wait-s", "0")
    found = mac.status(code=1)
    assert found["installed"] and not found["ready"] and found["url"] == f"http://127.0.0.1:{mac.port}/v1"
    assert found["reason"] == "the proxy does not listen yet" and found["home"] == str(mac.home)
    assert found["agents"]["proxy"]["pid"] == 4242
    (mac.home / "warmline.toml").write_text("no_such_key = 1")
    assert "no_such_key" in mac.status(code=1)["reason"]
    Path(found["agents"]["backend"]["file"]).unlink()
    shown = mac.run("status", code=1).output
    assert "proxy    running, process 4242 (com.warmline.proxy)" in shown
    assert "backend  not installed, but process 4242 runs as it" in shown


def test_install_without_manager_writes_nothing(linux: FakeUser) -> None:
    (linux.root / "bin" / "systemctl").write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    assert "loginctl enable-linger" in linux.install(code=3).output
    assert not (linux.root / ".config").exists() and not linux.home.exists()


def test_uninstall_stops_process_without_file(mac: FakeUser) -> None:
    mac.install("--wait-s", "0")
    proxy, backend = (mac.root / "Library/LaunchAgents" / f"com.warmline.{role}.plist" for role in ("proxy", "backend"))
    backend.unlink()
    mac.install("--wait-s", "0")
    labels = [f"gui/{os.getuid()}/com.warmline.{role}" for role in ("proxy", "backend")]
    assert mac.calls[-6:-4] == [["bootout", label] for label in labels]
    proxy.unlink()
    backend.unlink()
    output = mac.run("uninstall").output
    assert "stopped com.warmline.proxy" in output and "stopped com.warmline.backend" in output
    assert "no launch agents are installed" in mac.run("uninstall").output


def test_systemd_uninstall_stops_process_without_file(linux: FakeUser) -> None:
    linux.install("--wait-s", "0")
    for unit in (linux.root / ".config/systemd/user").glob("*.service"):
        unit.unlink()
    assert "stopped warmline-backend.service" in linux.run("uninstall").output
    assert ["stop", "warmline-proxy.service"] in [call[-2:] for call in linux.calls]
    assert "no user services are installed" in linux.run("uninstall").output


@pytest.mark.parametrize("verb", ["status", "restart", "logs"])
def test_not_installed_exits_with_1(linux: FakeUser, verb: str) -> None:
    shown = linux.run(verb, code=1).output
    assert "backend  not installed" in shown or "no user services are installed; `warmline service install`" in shown


def test_failed_start_is_reported_with_its_output(mac: FakeUser) -> None:
    mac.install("--wait-s", "0")
    (mac.home / "logs" / "backend.stderr").write_text("warmline backend: can't serve nowhere\n")
    mac.run("uninstall")
    mac.then("exit 0")
    mac.install("--wait-s", "0")
    (mac.home / "logs" / "proxy.stderr").write_text("warmline: no\n")
    output = mac.run("restart", "proxy", code=1).output
    assert "the proxy does not run, exit code 0:\n  warmline: no\n" in output and "`warmline launchd logs`" in output
    assert (
        "proxy    not running, exit code 0 (com.warmline.proxy)\n         warmline: no\n"
        in mac.run("status", code=1).output
    )


@pytest.mark.parametrize("words", [("--out", "x"), ("--port", "http"), ("--name", "A B"), ("--no-such-flag",)])
def test_bad_usage_exits_with_2(mac: FakeUser, words: tuple[str, ...]) -> None:
    mac.install(*words, code=2)
    assert not mac.calls


def test_install_checks_home_and_ports_first(mac: FakeUser) -> None:
    (mac.home / "run").mkdir(parents=True)
    with process_lock(mac.home / "run" / "backend.lock"):
        output = mac.install(code=2).output
        assert f"{mac.home} is in use by process {os.getpid()} (run/backend.lock)" in output
    with socket.create_server(("127.0.0.1", mac.port)):
        about = {"pid": os.getpid(), "url": f"http://127.0.0.1:{mac.port}"}
        (mac.home / "run" / "proxy.json").write_text(json.dumps(about))
        output = mac.install(code=2).output
        assert f"port {mac.port} (--port): Address already in use; stop what" in output, (
            "not by who told so and was killed"
        )
    assert not mac.calls


def test_missing_or_refusing_manager_exits_with_3(mac: FakeUser, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = mac.root / "bin" / "launchctl"
    tool.write_text("#!/bin/sh\necho 'Bootstrap failed: 125: Domain does not support specified action' >&2\nexit 125\n")
    assert "launchctl print" in (output := mac.run("status", code=3).output) and "log in there" in output
    tool.unlink()
    assert mac.run("status", code=3).output.count("\n") == 1
    assert "on Linux use `warmline service`" in mac.install(code=3).output
    mac.install("--dry-run")


# ---- the documentation


def test_documented_commands_run_in_order(mac: FakeUser, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the one machine here; `warmline service` has the same verbs."""
    text = (Path(__file__).parents[3] / "docs" / "launchd.md").read_text()
    typed = re.findall(r"^ *warmline launchd (.+)$", text, flags=re.MULTILINE)
    assert {words.split()[0] for words in typed} == {"install", "status", "restart", "logs", "uninstall"}
    monkeypatch.setattr("warmline_run.services.actions.wait", lambda pair, config, wait_s: 0)
    for verb, *words in map(shlex.split, typed[: typed.index("uninstall") + 1]):
        codes = {"status": 1}  # nothing listens
        if verb == "install":
            mac.install(*words)
            (mac.home / "logs" / "backend.log").write_text("started\n")
        else:
            mac.run(verb, *words, code=codes.get(verb, 0))


def test_document_explains_every_plist_key(mac: FakeUser) -> None:
    text = (Path(__file__).parents[3] / "docs" / "launchd.md").read_text()
    mac.install("--dry-run", "--out", str(mac.root))
    plist = plistlib.loads((mac.root / "com.warmline.proxy.plist").read_bytes())
    obvious = {"Label", "WorkingDirectory", "StandardOutPath", "Umask"}
    assert all(f"`{key}`" in text for key in plist.keys() - obvious)
    assert f"`ThrottleInterval` {plist['ThrottleInterval']}" in text and f"after {systemd.RESTART_S} seconds" in text
