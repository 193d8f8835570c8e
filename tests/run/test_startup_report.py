"""Report of a start, by the state in the proxy's status."""

import copy
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from warmline_common.settings.resolve import ResolvedConfig, resolve
from warmline_common.settings.table import get_default
from warmline_run import ports, probe, startup_report
from warmline_run.address import Address, make_address

KEY_HINT = "the admin key opens it: cachectl key show admin --home /nowhere"
REMOTE_KEY_HINT = "from other machines it asks for the admin key: cachectl key show admin --home /nowhere"
STATUS: dict[str, Any] = {
    "persistence": "ok",
    "reuse": "fast",
    "disk_budget_bytes": 50_000_000_000,
    "totals": {
        **{"sessions": 12, "tokens": 34_567, "bytes_segments": 1_200_000_000, "bytes_checkpoints": 30_000_000},
        **{"bytes_quarantined": 1_000_000, "bytes_writing": 2_000_000, "bytes_doomed": 3_000_000},
        "bytes_index": 4_000_000,
    },
    "engine": {
        **{"model": "a-model", "device": "Apple M2 Ultra", "context_tokens_max": 131_072},
        "memory_budget_bytes": 64_000_000_000,
        "layout": {"persistent": True, "why_not": "", "dtype": "bfloat16"},
    },
}


def make_config(**settings: str) -> ResolvedConfig:
    return resolve({"home": "/nowhere", **settings}, {})


def list_report_lines(change: dict[str, Any], **settings: str) -> dict[str, str]:
    """List the report's lines by their first words."""
    status, config = copy.deepcopy(STATUS), make_config(**settings)
    for path, value in change.items():
        *above, name = path.split(".")
        holder = status
        for each in above:
            holder = holder[each]
        holder[name] = value
    lines = startup_report.format_report(status, config, make_address(config)).splitlines()
    return {name: rest.strip() for name, _, rest in (line.partition(" ") for line in lines)}


def test_each_fact_has_a_line() -> None:
    assert list_report_lines({}) == {
        "model": "a-model on Apple M2 Ultra, KV in bfloat16",
        "context": "131,072 tokens",
        "memory": "64 GB for conversations",
        "disk": "1.24 GB of 50 GB used: 12 conversations, 34,567 tokens",
        "kept": "on disk, across restarts",
        "dashboard": "http://127.0.0.1:8026/admin",
        "requests": "cachectl top --home /nowhere shows them",
        "explain": "cachectl explain --home /nowhere says why one was not warm",
    }


def test_models_that_cannot_be_loaded_are_named() -> None:
    models = [
        {"name": "a", "stage": "loaded", "reason": ""},
        {"name": "b", "stage": "starting", "reason": "its size is being read"},
        {"name": "c", "stage": "unloaded", "reason": "it needs 40 GB"},
    ]
    assert list_report_lines({"models": models[:2]})["models"] == "a (loaded), b (starting)"
    shown = "a (loaded), b (starting), c (can't be loaded); `warmline models ls --home /nowhere` says why"
    assert list_report_lines({"models": models})["models"] == shown


@pytest.mark.parametrize(
    ("stages", "name"),
    [
        ({}, ""),
        ({"a": "unloaded", "b": "unloaded"}, "a"),
        ({"a": "unloaded", "b": "starting", "c": "loaded"}, "b"),
        ({"b": "loaded", "a": "starting"}, "a"),
        ({"a": "failed", "b": "unloaded"}, "b"),
    ],
)
def test_first_request_is_for_a_model_that_needs_no_other_unloaded(stages: dict[str, str], name: str) -> None:
    models = [
        {"name": each, "stage": stage, "reason": "damaged" if stage == "failed" else "", "default": each == "a"}
        for each, stage in stages.items()
    ]
    assert startup_report.choose_example_model({"models": models}) == name


def test_report_waits_for_sizes_that_are_being_read() -> None:
    known, unfit = {"need_bytes": 10, "reason": ""}, {"need_bytes": 0, "reason": "no config.json"}
    assert not startup_report.has_unknown_sizes({"models": [known, unfit]}) and not startup_report.has_unknown_sizes({})
    assert startup_report.has_unknown_sizes({"models": [known, {"need_bytes": 0, "reason": ""}]})


def test_report_without_a_loaded_model_has_the_other_facts() -> None:
    models = [{"name": "a", "stage": "unloaded", "reason": ""}]
    lines = list_report_lines({"models": models, "engine": None})
    assert lines["models"] == "a (unloaded)"
    assert list(lines) == ["models", "disk", "dashboard", "requests", "explain"]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"reuse": "off"}, "nothing, since reuse is off"),
        (
            {"engine.layout": {"persistent": False, "why_not": "no codec for OddCache", "dtype": "float32"}},
            "in memory alone: no codec for OddCache",
        ),
        ({"persistence": "index/: no space"}, "in memory alone, since saving fails: index/: no space"),
        ({"disk_budget_bytes": 0}, "in memory alone, since the disk budget is 0"),
    ],
)
def test_report_explains_missing_persistence(change: dict[str, Any], kept: str) -> None:
    assert list_report_lines(change)["kept"] == kept


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"lan": "true"}, f"http://127.0.0.1:8026/admin ({REMOTE_KEY_HINT})"),
        ({"host": "::1", "port": "80"}, "http://[::1]:80/admin"),
        ({"admin_needs_key": "true"}, f"http://127.0.0.1:8026/admin ({KEY_HINT})"),
        ({"allowed_hosts": "llm.example.org"}, f"http://127.0.0.1:8026/admin ({KEY_HINT})"),
        (
            {"lan": "true", "allowed_hosts": "llm.example.org"},
            f"http://127.0.0.1:8026/admin ({REMOTE_KEY_HINT})",
        ),
        ({"lan": "true", "admin_needs_key": "true"}, f"http://127.0.0.1:8026/admin ({KEY_HINT})"),
        ({"lan": "true", "host": "10.0.0.7"}, f"http://10.0.0.7:8026/admin ({KEY_HINT})"),
    ],
)
def test_report_names_dashboard_and_key(settings: dict[str, str], where: str) -> None:
    assert list_report_lines({}, **settings)["dashboard"] == where


def test_hint_in_report_omits_default_home() -> None:
    shown = list_report_lines({}, home=get_default("home"), admin_needs_key="true")["dashboard"]
    assert shown.endswith("(the admin key opens it: cachectl key show admin)")


def test_unknown_facts_are_omitted() -> None:
    assert list_report_lines({"engine.context_tokens_max": 0})["context"] == "the model does not say how long"
    empty = {"sessions": 0, "tokens": 0, **dict.fromkeys(STATUS["totals"].keys() - {"sessions", "tokens"}, 0)}
    assert list_report_lines({"totals": empty})["disk"] == "0 B of 50 GB used: no conversation is stored"
    for broken in ({}, {"engine": None}, {**STATUS, "totals": {}}, {**STATUS, "engine": {"model": "m"}}):
        assert startup_report.format_report(broken, make_config(), Address("127.0.0.1", 80)) == ""


def test_silent_proxy_prints_nothing(tmp_path: Path) -> None:
    assert startup_report.read_report(make_config(home=str(tmp_path), port="9")) == "", "no secret"
    (tmp_path / "secret").write_text("hush\n")
    assert startup_report.read_report(make_config(home=str(tmp_path), port="9")) == "", "nobody listens"


def test_secret_is_not_sent_to_other_listener(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush\n")
    (tmp_path / "run").mkdir()
    lock = tmp_path / "home.lock"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        place = {"pid": os.getpid(), "url": f"http://127.0.0.1:{port}"}
        lock.write_text(f"{os.getpid()}\n")
        for content in ({}, place):  # as a proxy leaves it that was killed
            (tmp_path / "run" / "proxy.json").write_text(json.dumps(content))
            assert probe.read_status(Address("127.0.0.1", port), tmp_path) == {}
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert ports.is_listening(tmp_path, port) and not ports.is_listening(tmp_path, port + 1)
            config = make_config(home=str(tmp_path), port=str(port))
            assert f"(process {os.getpid()} serves {tmp_path} at {place['url']}; " in ports.describe_occupied_port(
                config
            )
        described = ports.describe_occupied_port(config)
        assert described.endswith("(--port): Address already in use; stop what listens there, or use another --port"), (
            "and is not taken for it"
        )
