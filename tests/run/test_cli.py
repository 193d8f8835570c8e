"""`warmline` as a process; where it ends before anything is started, mostly in the tests' own."""

import json
import socket
from importlib.metadata import version
from pathlib import Path

import pytest

from support.processes import free_port
from support.run.warmline_command import invoke_warmline, run_warmline


@pytest.mark.parametrize("command", ["serve", "backend"])
def test_missing_model_folder_is_found_before_a_start(command: str, tmp_path: Path) -> None:
    (tmp_path / "qwen3-8b").mkdir()
    advice = "give a model's folder, or a repository's name as owner/model"
    expected = {
        "qwen3-8B": f"there is no such folder; near it: {tmp_path}/qwen3-8b",
        "qwen3-8b": f"not a model's folder, it has no config.json; {advice}",
        "zzz": f"there is no such folder; {advice}",
    }
    for name, reason in expected.items():
        model = str(tmp_path / name)
        ports = ("--port", str(free_port()), "--backend-port", str(free_port()))
        done = run_warmline(
            command, "--home", str(tmp_path / "home"), "--model", model, *(ports if command == "serve" else ())
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1].endswith(f"--model {model}: {reason}")
    assert not (tmp_path / "home").exists()


def test_doctor_refuses_empty_name(tmp_path: Path) -> None:
    done = run_warmline("doctor", "", "--home", str(tmp_path / "home"))
    assert done.returncode == 2 and "MODEL: expected a folder, a repository's name, or demo, not ''" in done.stderr
    assert not (tmp_path / "home").exists()


def test_config_prints_each_setting_with_its_source(tmp_path: Path) -> None:
    (tmp_path / "warmline.toml").write_text('served_name = "mine"\nclient_key = "hush"')
    answer = run_warmline("config", "--home", str(tmp_path), "--port", "9000", "--json", WARMLINE_REUSE="off")
    shown = json.loads(answer.stdout)
    assert shown["served_name"] == {"value": "mine", "source": str(tmp_path / "warmline.toml")}
    assert shown["port"] == {"value": 9000, "source": "--port"}
    assert shown["reuse"] == {"value": "off", "source": "WARMLINE_REUSE"}
    assert shown["backend_port"] == {"value": 8025, "source": "default"}
    assert shown["client_key"]["value"] == "(set)" and "hush" not in answer.stdout
    table = run_warmline("config", "--home", str(tmp_path), "--port", "9000").stdout
    shown_rows = [line.split() for line in table.splitlines()]
    for row in (["port", "9000", "--port"], ["lan", "false", "default"], ["disk_budget_gb", "50", "default"]):
        assert row in shown_rows, "as it is typed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reuse", "exactly"], "fast, exact or off"),
        (["--host", "0.0.0.0"], "client key"),
        (["--port", "http"], "whole number"),
        (["--no-such-flag"], "no-such-flag"),
        (["--client-key", "hush"], "--client-key is no flag, since command lines are visible to all: set WARMLINE_CL"),
    ],
)
def test_bad_command_line_exits_with_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    for command in ("serve", "proxy", "backend", "config"):
        answer = invoke_warmline(command, "--home", str(tmp_path), *arguments)
        assert answer.returncode == 2
        assert message in answer.stderr
        assert "Traceback" not in answer.stderr and "hush" not in answer.stderr


def test_misspelt_variable_is_reported(tmp_path: Path) -> None:
    answer = run_warmline("config", "--home", str(tmp_path), "--json", WARMLINE_STALL_TIMEOUT="5")
    assert answer.returncode == 0
    assert answer.stderr == (
        "warmline: WARMLINE_STALL_TIMEOUT is no setting and has no effect; did you mean WARMLINE_STALL_TIMEOUT_S?\n"
    )
    assert json.loads(answer.stdout)["stall_timeout_s"]["source"] == "default"


def test_bad_toml_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "warmline.toml").write_text("prefil_step_size = 3")
    answer = run_warmline("serve", "--home", str(tmp_path))
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1 and "prefill_step_size" in answer.stderr


@pytest.mark.parametrize("flag", ["--port", "--backend-port"])
def test_port_in_use_is_reported(tmp_path: Path, flag: str) -> None:
    ports = {"--port": free_port(), "--backend-port": free_port()}
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        ports[flag] = holder.getsockname()[1]
        chosen = [text for pair in ports.items() for text in map(str, pair)]
        answer = run_warmline("serve", "--home", str(tmp_path), "--model", str(tmp_path), *chosen)
    assert answer.returncode == 2
    assert f"port {ports[flag]} ({flag})" in answer.stderr and "in use" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--list"], 0, "long-transcript"),
        (["--only", "nothing"], 2, "there is no gate 'nothing'; there are load, completion"),
        (["--turns", "1"], 2, "'--turns': expected a whole number from 2 to 1000, not '1'"),
        (["--turn-kb", "much"], 2, "'--turn-kb': expected a number of kilobytes, from 0.2 to 1000, not 'much'"),
        (["--home", ""], 2, "expected a directory"),
        (["--url", "localhost:8026/v1"], 2, "expected an address such as http://127.0.0.1:8026/v1"),
        (["--url", "http://[::1/v1"], 2, "expected an address"),
        (["--url", "http://127.0.0.1:x/v1"], 2, "expected an address"),
    ],
)
def test_gates_list_and_unknown_gate(arguments: list[str], code: int, message: str) -> None:
    answer = invoke_warmline("gates", *arguments)
    assert answer.returncode == code
    assert message in answer.stdout + answer.stderr and "Traceback" not in answer.stderr


def test_gates_exit_with_2_without_server(tmp_path: Path) -> None:
    answer = run_warmline("gates", "--home", str(tmp_path), WARMLINE_PORT=str(port := free_port()))
    assert answer.returncode == 2
    assert f"nothing answers at http://127.0.0.1:{port}/v1/models" in answer.stderr and "--url" in answer.stderr


def test_warmline_version_is_installed_version() -> None:
    answer = run_warmline("--version")
    assert (answer.returncode, answer.stdout) == (0, f"warmline {version('warmline')}\n")
