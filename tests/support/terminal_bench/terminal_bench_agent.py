"""Terminal-Bench's own agent and LLM class against a pair.  Run by a Python that has them; prints what it saw as JSON.

Importing the package itself would import its harness, and with that Docker, Streamlit and half a gigabyte more.  So its
packages are entered without their `__init__`, and the terminal, a tmux session in a container, is a shell in a folder
here.  All else is Terminal-Bench's: the agent's loop and prompts, its parser, its chat, its LLM class and LiteLLM.

Usage: tb run --agent terminus-2 --model NAME --agent-kwarg api_base=URL, with the right key in OPENAI_API_KEY
"""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

API_CALLS_MAX = 8  # more than the task takes
WORDS_TOO_MANY = 300_000  # more tokens than the model's context has


def stub_harness() -> None:
    spec = importlib.util.find_spec("terminal_bench")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    for name in ("terminal_bench", "terminal_bench.agents", "terminal_bench.terminal"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    terminal: Any = ModuleType("terminal_bench.terminal.tmux_session")
    terminal.TmuxSession = Shell
    sys.modules[terminal.__name__] = terminal


class Shell:
    """Session as the agent uses it: keys go in, new output comes out."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._new, self._name = folder, "", "Current Terminal Screen"
        self._gate = folder / "gate"

    def is_session_alive(self) -> bool:
        return True

    def send_keys(self, keys: str, block: bool, min_timeout_sec: float) -> None:
        if self._gate.exists():  # a pipe, of a test that has something to do while a command runs
            self._gate.read_bytes()
            self._gate.unlink()
        done = subprocess.run(
            ["bash", "-c", keys], cwd=self._folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._new += f"$ {keys}{done.stdout}"

    def get_incremental_output(self) -> str:
        text, self._new = f"{self._name}:\n{self._new}$ \n", ""
        self._name = "New Terminal Output"
        return text

    def get_asciinema_timestamp(self) -> float:
        return 0.0


def run_task(model: str, url: str, folder: Path) -> Any:
    """Run the agent as the harness does, except for its temperature of 0.7, which would make each run differ."""
    agent_class = importlib.import_module("terminal_bench.agents.terminus_2.terminus_2").Terminus2
    agent = agent_class(model_name=model, api_base=url, temperature=0.0, max_episodes=API_CALLS_MAX)
    result = agent.perform_task('Write "Hello, world!" to hello.txt.', Shell(folder))
    return {
        "commands": [marker for _, marker in result.timestamped_markers],
        "failure": result.failure_mode.value,
        "text": (folder / "hello.txt").read_text(),
    }


def run_chat(url: str) -> Any:
    """Run two turns of one conversation."""
    talk = llms.Chat(llms.LiteLLM("openai/chat", temperature=0.0, api_base=url))
    return [talk.chat("What is the capital of France?"), talk.chat("What is the capital of Japan?")]


def run_structured(url: str) -> Any:
    """Ask for a structured answer, as Terminal-Bench does."""
    from pydantic import BaseModel  # it comes with Terminal-Bench

    class Place(BaseModel):
        city: str
        country: str

    llm = llms.LiteLLM("openai/structured", temperature=0.0, api_base=url)
    return json.loads(llm.call("Describe Italy as JSON.", response_format=Place))


def find_failure(model: str, url: str, prompt: str, **options: object) -> Any:
    """Provoke a failure; (exception of the LLM class, number of tries)."""
    base, litellm = importlib.import_module("terminal_bench.llms.base_llm"), importlib.import_module("litellm")
    expected = base.ContextLengthExceededError, base.OutputLengthExceededError, litellm.AuthenticationError
    talk = llms.Chat(llms.LiteLLM(f"openai/{model}", temperature=0.0, api_base=url))
    try:
        answer = talk.chat(prompt, **options)
    except expected as error:
        tries = llms.LiteLLM.call.statistics["attempt_number"]  # tenacity counts them
        return {"raised": type(error).__name__, "tries": tries}
    return {"raised": None, "answer": answer}


def main(model: str, url: str, folder: Path) -> None:
    print(
        json.dumps(
            {
                "task": run_task(model, url, folder),
                "chat": run_chat(url),
                "structured": run_structured(url),
                "too-long": find_failure("too-long", url, "1 2 " * (WORDS_TOO_MANY // 2)),
                "cut": find_failure("cut", url, "What is the capital of Spain?", max_tokens=12),
                "wrong-key": find_failure("wrong-key", url, "What is the capital of Spain?", api_key="wrong"),
            }
        )
    )


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Options of `tb run` that are the agent's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["run"])
    parser.add_argument("--agent", choices=["terminus-2"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--agent-kwarg", type=lambda text: text.removeprefix("api_base="), required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse_options(sys.argv[1:])
    stub_harness()
    llms: Any = importlib.import_module("terminal_bench.llms")
    main(options.model, options.agent_kwarg, Path.cwd())
