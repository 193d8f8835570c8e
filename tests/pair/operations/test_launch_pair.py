"""`warmline launch` on a running pair: the variables that a client gets, and the terminal that it has.

The client is a small program under a client's name; `make launch-clients` has the real ones.
"""

import os
import pty
import subprocess
from pathlib import Path

import pytest

from support.launch.launched_client import make_environment
from support.pair.pair import WARMLINE, Pair
from support.processes import free_port
from support.run.warmline_command import invoke_warmline

SHOWS_VARIABLES = """echo "$OPENAI_API_KEY $LLM_MODEL $1"
grep -c api_base "$LLM_USER_PATH/extra-openai-models.yaml"
exit 7"""
WAITS_FOR_CTRL_C = """test -t 0 && test -t 1 && test -t 2 || exit 3
trap 'echo interrupted; exit 9' INT
echo waits
while true; do sleep 0.05; done"""
CTRL_C = b"\x03"


def write_client(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def read_until(terminal: int, word: bytes) -> bytes:
    """Output of the terminal up to a word, or to its end."""
    shown = b""
    while word not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the end of a terminal, on Linux
            break
    return shown


def test_printed_text_starts_the_client_in_a_shell(agent_pair: Pair, tmp_path: Path) -> None:
    write_client(tmp_path, "llm", SHOWS_VARIABLES)
    home = str(agent_pair.home.root)
    printed = invoke_warmline("launch", "llm", "--print", "--home", home, "--key", "it's", "--", "two words")
    assert printed.returncode == 0 and printed.stderr == ""
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", printed.stdout], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "it's agent two words\n1\n")


def test_the_terminal_and_ctrl_c_are_the_clients(agent_pair: Pair, tmp_path: Path) -> None:
    """The pair was not started here, and goes on; the key is shown nowhere."""
    write_client(tmp_path, "llm", WAITS_FOR_CTRL_C)
    command = [WARMLINE, "launch", "llm", "--home", str(agent_pair.home.root), "--key", "secret-key"]
    environment = make_environment(agent_pair, tmp_path, str(tmp_path))
    pid, terminal = pty.fork()
    if not pid:
        os.execve(WARMLINE, command, environment)
    shown = read_until(terminal, b"waits")
    os.write(terminal, CTRL_C)
    shown += read_until(terminal, b"interrupted")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9, shown
    os.close(terminal)
    assert b"secret-key" not in shown and b"LLM_MODEL=agent" in shown
    assert agent_pair.is_up


def test_what_is_wrong_is_said(agent_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    home = ("--home", str(agent_pair.home.root))
    for arguments, code, message in (
        (["claude", *home], 127, "Claude Code is not installed"),
        (["emacs", *home], 2, "there is no client 'emacs' to launch; there are claude, codex"),
        (["llm", "--print", *home, "--model", "small"], 2, "has no model 'small': name one of agent, or"),
        (["llm", "--print", *home, "--url", f"http://127.0.0.1:{free_port()}"], 2, "nothing answers at http://127"),
    ):
        done = invoke_warmline("launch", *arguments)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
