"""Clients started by `warmline launch`, each with a tool call, and a `kill -9` of the pair in its middle.

`make launch-clients` installs them and runs this; its name keeps it out of `make test`.  All that are on
WARMLINE_LAUNCH_CLIENTS_PATH are launched beside each other: the first one starts the pair, the others find it.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.agent_model.agent_folder import build
from support.launch.launched_client import WAIT, LaunchedClient
from support.pair.pair import Pair
from support.pair.waiting import wait_until
from support.processes import is_running
from warmline_run import probe
from warmline_run.address import Address
from warmline_run.launch.clients import CLIENTS

CLIENTS_PATH = os.environ["WARMLINE_LAUNCH_CLIENTS_PATH"]
REUSED_SHARE = 0.6  # of the shortest prompt, and of aider's, which moves a reminder; else nearly all

# Prompts are as short as each client lets them be: how fast they are computed is not what this is about.
LLM_TOOLS = """import subprocess

def terminal(command: str) -> str:
    "Run a command"
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
"""
OPENCODE_TOOLS_OFF = ("edit", "glob", "grep", "read", "skill", "task", "todowrite", "webfetch", "write")
OPENCODE_PROJECT = {
    "tools": dict.fromkeys(OPENCODE_TOOLS_OFF, False),
    "agent": {"title": {"disable": True}, "build": {"prompt": "You run commands."}},
}


@dataclass(frozen=True)
class Task:
    """Work of one client: its arguments, what is typed, the files of its project, and what it prints in the end."""

    arguments: Sequence[str]
    typed: str = ""
    files: tuple[tuple[str, str], ...] = ()
    printed: str = "The tool says: opened."


TASKS = {
    "llm": Task(["--functions", "tools.py", f"Use terminal: {WAIT}"], files=(("tools.py", LLM_TOOLS),)),
    "claude": Task(["-p", f"Use Bash: {WAIT}", "--tools", "Bash", "--allowedTools", "Bash"]),
    "opencode": Task(["run", f"Use bash: {WAIT}"], files=(("opencode.json", json.dumps(OPENCODE_PROJECT)),)),
    "hermes": Task(["chat", "-Q", "-t", "terminal", "-q", f"Use terminal: {WAIT}", "--yolo"]),
    # It has no tools: a command that is typed puts its output into the chat.
    "aider": Task(
        ["--no-git", "--yes-always", "--no-analytics", "--no-check-update", "--no-show-release-notes"],
        typed=f"Say: hello\n/run {WAIT}\nSay: done\n",
        printed="opened",
    ),
    # It is launched when the others wait, since it takes a command of ten seconds for one that goes on.
    "codex": Task(
        [
            *("-c", "features.multi_agent=false", "-c", "model_instructions_file=instructions.md"),
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            f"Use exec_command: {WAIT}",
        ],
        files=(("instructions.md", "You run commands."),),
        printed="The tool says: ",
    ),
}
INSTALLED = [name for name in TASKS if shutil.which(CLIENTS[name].program, path=CLIENTS_PATH)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Pair that is not started here, for what it tells."""
    return Pair(tmp_path_factory.mktemp("home"), Path())


@pytest.fixture(scope="module")
def clients(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LaunchedClient]]:
    """All clients, ended, after a kill of the pair while each waited for its tool."""
    model, folder = build(tmp_path_factory.mktemp("models") / "agent"), tmp_path_factory.mktemp("clients")
    launched: dict[str, LaunchedClient] = {}
    try:
        for name in INSTALLED:
            if name == "codex":
                wait_for_tools(launched)
            launched[name] = launch(name, folder / name, pair, model)
        wait_for_tools(launched)
        pair.settle()
        kill_pair(pair)
        wait_until(lambda: is_ready(pair), "the pair is not started again")
        for client in launched.values():
            client.end_tool()
        for client in launched.values():
            client.wait()
        yield launched
    finally:
        for client in launched.values():
            client.process.terminate()


def launch(name: str, folder: Path, pair: Pair, model: Path) -> LaunchedClient:
    folder.mkdir()
    for file, text in TASKS[name].files:
        (folder / file).write_text(text)
    words = ["--model", str(model), "--", *TASKS[name].arguments]
    return LaunchedClient(name, pair, folder, CLIENTS_PATH, *words, typed=TASKS[name].typed)


def wait_for_tools(launched: dict[str, LaunchedClient]) -> None:
    for client in launched.values():
        client.wait_for_tool()


def kill_pair(pair: Pair) -> None:
    """Kill `warmline serve` first, so that only `warmline launch` starts anything again."""
    proxy, backend = pair.pid("proxy"), pair.pid("backend")
    listed = subprocess.run(["ps", "-o", "ppid=", "-p", str(proxy)], capture_output=True, text=True, check=True)
    killed = [int(listed.stdout), proxy, backend]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, killed)), "a killed process lives on")


def is_ready(pair: Pair) -> bool:
    return probe.read_readiness(Address("127.0.0.1", pair.port)).is_ready


@pytest.mark.parametrize("name", INSTALLED)
def test_the_task_is_finished(clients: dict[str, LaunchedClient], name: str) -> None:
    output = clients[name].read_output()
    assert clients[name].process.returncode == 0, output
    assert TASKS[name].printed in output


def test_each_turn_after_the_kill_is_warm(pair: Pair, clients: dict[str, LaunchedClient]) -> None:
    for turn in pair.requests()[: len(INSTALLED)]:  # the newest first; each client has sent one
        assert turn["outcome"] == "ok" and turn["source"] == "restored", turn
        assert turn["cached_tokens"] >= REUSED_SHARE * turn["prompt_tokens"], turn


def test_the_pair_ends_with_the_last_client(pair: Pair, clients: dict[str, LaunchedClient]) -> None:
    assert not is_ready(pair)
    assert not pair.home.pid_file("proxy").exists()
