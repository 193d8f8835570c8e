"""Clients that can be launched, and the settings that have each use a server.  Pure.

docs/clients.md has the same settings, for people; tests/run/launch compares them.  Clients with a configuration file
get one in a folder of ours, or its content in a variable: their own files stay as they are.  The key stands in one
variable and nowhere else, since command lines are visible to all.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_S = 3600  # a long cold prompt takes longer than clients wait by default
HERMES_TIMEOUT_S = 7200
OUTPUT_TOKENS_MAX = 32_000  # of one answer
OUTPUT_SHARE = 4  # of the context that an answer may take, as a divisor: a client subtracts it from the context
AGENT_CONTEXT_TOKENS_MIN = 20_000  # of less, the first prompts of agents take most or all
AGENT_KEY = "LOCAL_API_KEY"
OPENAI_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class ModelFacts:
    """Model as the server lists it.  `context_tokens` is 0 where that is not known."""

    name: str
    context_tokens: int = 0


@dataclass(frozen=True)
class ServerFacts:
    """Facts that settings are made from.  `url` ends in /v1; `models` has the chosen one first."""

    url: str
    models: Sequence[ModelFacts]

    @property
    def model(self) -> ModelFacts:
        return self.models[0]


@dataclass(frozen=True)
class ClientSettings:
    """Variables, options and files (by their paths) for a client; `options` stand before the arguments of the user."""

    variables: Mapping[str, str]
    options: Sequence[str] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchableClient:
    """Client that can be launched.  `title` is that of its section in docs/clients.md.

    `make_settings` takes the server and a folder for the client's files; `is_agent`: its first prompt is long.
    """

    name: str
    title: str
    program: str
    install_command: str
    key_variable: str
    make_settings: Callable[[ServerFacts, Path], ClientSettings]
    is_agent: bool = True

    def fits(self, model: ModelFacts) -> bool:
        """False for a context that the client's first prompt may fill."""
        return not self.is_agent or not 0 < model.context_tokens < AGENT_CONTEXT_TOKENS_MIN


def _make_claude_settings(server: ServerFacts, folder: Path) -> ClientSettings:
    context = server.model.context_tokens
    return ClientSettings(
        {
            "ANTHROPIC_BASE_URL": server.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "",  # or it asks whether to use it, and prefers it
            "ANTHROPIC_MODEL": server.model.name,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "API_TIMEOUT_MS": str(TIMEOUT_S * 1000),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(context)} if context else {}),
        }
    )


def _make_codex_settings(server: ServerFacts, folder: Path) -> ClientSettings:
    context = server.model.context_tokens
    values: dict[str, object] = {
        "model": server.model.name,
        "model_provider": "warmline",
        **({"model_context_window": context} if context else {}),
        "model_providers.warmline.name": "Warmline",
        "model_providers.warmline.base_url": server.url,
        "model_providers.warmline.wire_api": "responses",
        "model_providers.warmline.env_key": AGENT_KEY,
        "model_providers.warmline.stream_idle_timeout_ms": TIMEOUT_S * 1000,
        "analytics.enabled": False,
    }
    # values are TOML, of which JSON's texts, numbers and switches are part
    options = [word for name, value in values.items() for word in ("-c", f"{name}={_format_json(value)}")]
    return ClientSettings({}, options)


def _make_opencode_settings(server: ServerFacts, folder: Path) -> ClientSettings:
    options = {
        "baseURL": server.url,
        "apiKey": f"{{env:{AGENT_KEY}}}",
        "timeout": False,
        "headerTimeout": False,
        "chunkTimeout": TIMEOUT_S * 1000,
    }
    models = {model.name: _describe_opencode_model(model) for model in server.models}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Warmline", "options": options, "models": models}
    content = {"model": f"warmline/{server.model.name}", "provider": {"warmline": provider}}
    return ClientSettings({"OPENCODE_CONFIG_CONTENT": _format_json(content)})


def _describe_opencode_model(model: ModelFacts) -> Mapping[str, object]:
    limit = {"context": model.context_tokens, "output": _limit_output(model)}
    described = {"name": model.name, "tool_call": True, "reasoning": True}
    return {**described, "limit": limit} if model.context_tokens else described


def _make_hermes_settings(server: ServerFacts, folder: Path) -> ClientSettings:
    context = server.model.context_tokens
    model = {
        "default": server.model.name,
        "provider": "custom",
        "base_url": server.url,
        "api_key": f"${{{AGENT_KEY}}}",
        **({"context_length": context} if context else {}),
    }
    content = {"model": model, "agent": {"local_stream_stale_timeout": HERMES_TIMEOUT_S}}
    files = {folder / "config.yaml": _format_json_file(content)}  # JSON is YAML
    return ClientSettings({"HERMES_HOME": str(folder)}, files=files)


def _make_aider_settings(server: ServerFacts, folder: Path) -> ClientSettings:
    metadata = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": server.model.context_tokens,
        "max_output_tokens": _limit_output(server.model),
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    name, file = f"openai/{server.model.name}", folder / "model-metadata.json"
    options = ["--model", name, "--openai-api-base", server.url, "--timeout", str(TIMEOUT_S)]
    if not server.model.context_tokens:
        return ClientSettings({}, options)
    files = {file: _format_json_file({name: metadata})}
    return ClientSettings({}, [*options, "--model-metadata-file", str(file)], files)


def _make_llm_settings(server: ServerFacts, folder: Path) -> ClientSettings:
    models = [
        {
            "model_id": model.name,
            "model_name": model.name,
            "api_base": server.url,
            "api_key_name": "warmline",
            "supports_tools": True,
            "supports_schema": True,
        }
        for model in server.models
    ]
    files = {folder / "extra-openai-models.yaml": _format_json_file(models)}  # JSON is YAML
    return ClientSettings({"LLM_USER_PATH": str(folder), "LLM_MODEL": server.model.name}, files=files)


def _make_terminal_bench_settings(server: ServerFacts, folder: Path) -> ClientSettings:
    model = ("--model", f"openai/{server.model.name}")
    return ClientSettings({}, ["run", "--agent", "terminus-2", *model, "--agent-kwarg", f"api_base={server.url}"])


def _limit_output(model: ModelFacts) -> int:
    return min(OUTPUT_TOKENS_MAX, model.context_tokens // OUTPUT_SHARE)


def _format_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _format_json_file(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


CLIENTS = {
    client.name: client
    for client in (
        LaunchableClient(
            "claude",
            "Claude Code",
            "claude",
            "npm install -g @anthropic-ai/claude-code",
            "ANTHROPIC_AUTH_TOKEN",
            _make_claude_settings,
        ),
        LaunchableClient("codex", "Codex", "codex", "npm install -g @openai/codex", AGENT_KEY, _make_codex_settings),
        LaunchableClient(
            "opencode", "OpenCode", "opencode", "npm install -g opencode-ai", AGENT_KEY, _make_opencode_settings
        ),
        LaunchableClient("hermes", "Hermes", "hermes", "pip install hermes-agent", AGENT_KEY, _make_hermes_settings),
        LaunchableClient("aider", "Aider", "aider", "pip install aider-chat", OPENAI_KEY, _make_aider_settings, False),
        LaunchableClient("llm", "LLM", "llm", "pip install llm", OPENAI_KEY, _make_llm_settings, False),
        LaunchableClient(
            "terminal-bench",
            "Terminal-Bench",
            "tb",
            "pip install terminal-bench",
            OPENAI_KEY,
            _make_terminal_bench_settings,
            False,
        ),
    )
}
