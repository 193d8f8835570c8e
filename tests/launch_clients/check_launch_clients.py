"""Clients started by `warmline launch`, each with a tool call, and a `kill -9` of the pair in its middle.

`make launch-clients` installs them and runs this; its name keeps it out of `make test`.  All that are on
WARMLINE_LAUNCH_CLIENTS_PATH are launched at once: the first one starts the pair, the others find it.  Their tool reads
a pipe, which nobody writes to until the pair was killed and is back.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.agent_model.agent_folder import build
from support.pair.pair import WARMLINE, Pair
from support.processes import is_running
from warmline_run import probe
from warmline_run.address import Address
from warmline_run.launch.clients import CLIENTS

TERMINAL_BENCH = "WARMLINE_TERMINAL_BENCH_PYTHON"  # if it is set, that client is tried, too
HARNESS = Path(__file__).parents[1] / "support" / "terminal_bench" / "bin"
CLIENTS_PATH = os.pathsep.join(
    [os.environ["WARMLINE_LAUNCH_CLIENTS_PATH"], *([str(HARNESS)] if os.environ.get(TERMINAL_BENCH) else [])]
)
TIMEOUT_S = 60
POLL_S = 0.02
REUSED_SHARE = 0.6  # of the shortest prompt, and of aider's, which moves a reminder; else nearly all
GATE, WAIT = "gate", "sh wait.sh"  # the pipe in each client's project, and the command that reads it

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
    "codex": Task(
        [
            *("-c", "features.multi_agent=false", "-c", "model_instructions_file=instructions.md"),
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            f"Use exec_command: {WAIT}",
        ],
        files=(("instructions.md", "You run commands."),),
        printed="The tool says: ",  # of a command that takes ten seconds, that it goes on
    ),
    "terminal-bench": Task([], printed="Hello, world!"),
}
INSTALLED = [name for name in TASKS if shutil.which(CLIENTS[name].program, path=CLIENTS_PATH)]


class LaunchedClient:
    """Client under `warmline launch`, in a project and a home folder of its own."""

    def __init__(self, name: str, folder: Path, pair: Pair, model: Path) -> None:
        self.task, self._folder = TASKS[name], folder
        for file, text in self.task.files:
            (folder / file).write_text(text)
        (folder / WAIT.split()[-1]).write_text(f"cat {GATE}\n")
        os.mkfifo(folder / GATE)
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WARMLINE_")},
            "HOME": str(folder),
            "PWD": str(folder),
            "PATH": os.pathsep.join([CLIENTS_PATH, os.environ["PATH"]]),
            "WARMLINE_PORT": str(pair.port),
            "WARMLINE_BACKEND_PORT": str(pair.backend_port),
            TERMINAL_BENCH: os.environ.get(TERMINAL_BENCH, ""),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches prices
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        }
        options = ["--home", str(pair.home.root), "--model", str(model)]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [WARMLINE, "launch", name, *options, "--", *self.task.arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=variables,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(self.task.typed.encode())
        self.process.stdin.close()

    def wait_for_tool(self) -> int:
        """Wait until the tool reads; the descriptor that it reads from."""
        limit = time.monotonic() + TIMEOUT_S
        while True:
            assert self.process.poll() is None and time.monotonic() < limit, self.read_output()
            with contextlib.suppress(OSError):  # of a pipe that nobody reads
                return os.open(self._folder / GATE, os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(POLL_S)

    def read_output(self) -> str:
        return (self._folder / "output").read_text()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Pair that is not started here, for what it tells."""
    return Pair(tmp_path_factory.mktemp("home"), Path())


@pytest.fixture(scope="module")
def clients(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LaunchedClient]]:
    """All clients, ended, after a kill of the pair while each waited for its tool."""
    model, folder = build(tmp_path_factory.mktemp("models") / "agent"), tmp_path_factory.mktemp("clients")
    started: dict[str, LaunchedClient] = {}
    try:
        for name in INSTALLED:
            (folder / name).mkdir()
            started[name] = LaunchedClient(name, folder / name, pair, model)
        gates = [client.wait_for_tool() for client in started.values()]
        pair.settle()
        kill_pair(pair)
        wait_until_ready(pair)
        for gate in gates:
            os.write(gate, b"opened\n")
            os.close(gate)
        for client in started.values():
            client.process.wait(TIMEOUT_S)
        yield started
    finally:
        for client in started.values():
            client.process.terminate()


def kill_pair(pair: Pair) -> None:
    """Kill the supervisor first: nothing of the pair starts anything again, but `warmline launch`."""
    proxy, backend = pair.pid("proxy"), pair.pid("backend")
    listed = subprocess.run(["ps", "-o", "ppid=", "-p", str(proxy)], capture_output=True, text=True, check=True)
    killed = [int(listed.stdout), proxy, backend]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    while any(map(is_running, killed)):
        time.sleep(POLL_S)


def wait_until_ready(pair: Pair) -> None:
    limit = time.monotonic() + TIMEOUT_S
    while not probe.read_readiness(Address("127.0.0.1", pair.port)).is_ready:
        assert time.monotonic() < limit, "the pair is not started again"
        time.sleep(POLL_S)


@pytest.mark.parametrize("name", INSTALLED)
def test_the_task_is_finished(clients: dict[str, LaunchedClient], name: str) -> None:
    output = clients[name].read_output()
    assert clients[name].process.returncode == 0, output
    assert clients[name].task.printed in output


def test_each_turn_after_the_kill_is_warm(pair: Pair, clients: dict[str, LaunchedClient]) -> None:
    for turn in pair.requests()[: len(INSTALLED)]:  # the newest first; each client has sent one at least
        assert turn["outcome"] == "ok" and turn["source"] == "restored", turn
        assert turn["cached_tokens"] >= REUSED_SHARE * turn["prompt_tokens"], turn


def test_the_pair_ends_with_the_last_client(pair: Pair, clients: dict[str, LaunchedClient]) -> None:
    assert not probe.read_readiness(Address("127.0.0.1", pair.port)).is_ready
    assert not pair.home.pid_file("proxy").exists()
