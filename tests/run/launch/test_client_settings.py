"""Settings that `warmline launch` makes are those of docs/clients.md."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

from support.docs.clients_page import list_commands, list_files, read_section
from warmline_run.launch.clients import AGENT_KEY, CLIENTS, ClientSettings, ModelFacts, ServerFacts

SERVER = ServerFacts("http://127.0.0.1:8026/v1", [ModelFacts("any-name", 200_000)])
FOLDER = Path("/home/dev/.warmline/launch/client")


def make_settings(name: str, server: ServerFacts = SERVER) -> ClientSettings:
    return CLIENTS[name].make_settings(server, FOLDER)


def read_exports(commands: str) -> dict[str, str]:
    """Variables that a block of commands sets."""
    words = [word for line in commands.splitlines() if line.startswith("export ") for word in shlex.split(line)[1:]]
    return dict(word.split("=", 1) for word in words)


def read_options(commands: str, program: str) -> list[str]:
    """Options of the block's command."""
    (command,) = [line for line in commands.replace("\\\n", "").splitlines() if line.startswith(f"{program} ")]
    return shlex.split(command)[1:]


def read_file(settings: ClientSettings) -> Any:
    (text,) = settings.files.values()
    return json.loads(text.replace(f"${{{AGENT_KEY}}}", "unused"))


def test_claude_code_has_the_variables_of_the_page() -> None:
    settings = make_settings("claude")
    exports = read_exports(list_commands("Claude Code")[0])
    assert {**settings.variables, CLIENTS["claude"].key_variable: "unused"} == exports


def test_codex_has_the_configuration_of_the_page() -> None:
    options = make_settings("codex").options
    assert set(options[::2]) == {"-c"}
    assert tomllib.loads("\n".join(options[1::2])) == tomllib.loads(list_files("Codex")[0])


def test_opencode_has_the_configuration_of_the_page() -> None:
    (content,) = make_settings("opencode").variables.values()
    page = json.loads(list_files("OpenCode")[0])
    del page["$schema"]
    assert json.loads(content.replace(f"{{env:{AGENT_KEY}}}", "unused")) == page


def test_hermes_has_the_configuration_of_the_page() -> None:
    assert read_file(make_settings("hermes")) == yaml.safe_load(list_files("Hermes")[0])


def test_aider_has_the_options_and_the_file_of_the_page() -> None:
    settings, commands = make_settings("aider"), list_commands("Aider")[0]
    options = [word.removeprefix(f"{FOLDER}/") for word in settings.options]
    assert options == read_options(commands, "aider")
    assert read_file(settings) == json.loads(list_files("Aider")[0])
    assert read_exports(commands) == {CLIENTS["aider"].key_variable: "unused"}


def test_llm_has_the_file_and_the_variables_of_the_page() -> None:
    settings = make_settings("llm")
    assert read_file(settings) == yaml.safe_load(list_files("LLM")[0])
    exports = {**settings.variables, CLIENTS["llm"].key_variable: "unused"}
    assert exports == {**read_exports(list_commands("LLM")[0]), "LLM_USER_PATH": str(FOLDER)}


def test_terminal_bench_has_the_options_of_the_page() -> None:
    page, commands = list[str](), list_commands("Terminal-Bench")[0]
    words = iter(read_options(commands, "tb"))
    for word in words:
        page += [] if word == "--dataset" and next(words) else [word]  # that is the user's choice
    assert make_settings("terminal-bench").options == page
    assert read_exports(commands) == {CLIENTS["terminal-bench"].key_variable: "unused"}


def test_each_section_names_the_variables_of_its_client() -> None:
    for client in CLIENTS.values():
        settings, section = make_settings(client.name), read_section(client.title)
        for name in (*settings.variables, client.key_variable):
            assert name in section, f"docs/clients.md, {client.title}: {name} is set by warmline launch, and not named"


def test_what_the_server_does_not_tell_is_left_out() -> None:
    """A model without a context length, and a model's name with an owner."""
    server = ServerFacts("http://[::1]:8026/v1", [ModelFacts("owner/model"), ModelFacts("other", 4096)])
    text = " ".join(str(make_settings(name, server)) for name in CLIENTS)
    assert "None" not in text and "200" not in text.replace("7200", "")
    (content,) = make_settings("opencode", server).variables.values()
    models = json.loads(content)["provider"]["warmline"]["models"]
    assert "limit" not in models["owner/model"] and models["other"]["limit"] == {"context": 4096, "output": 1024}


def test_the_key_is_in_no_option_and_no_file() -> None:
    """Command lines are visible to all, and files stay."""
    for client in CLIENTS.values():
        settings = make_settings(client.name)
        assert client.key_variable not in settings.variables
        assert "unused" not in f"{settings.options} {settings.files} {settings.variables}"
