"""An agent as a systemd user unit, and back.  Pure."""

import re

from warmline_run.services.manager import Installed
from warmline_run.services.service import Agent

RESTART_S = 5
DESCRIPTORS = 8192
CONFIGURATION = 2  # the exit code that starting again does not help
PLAIN = re.compile(r"[\w@+=:,./~-]+", re.ASCII)
WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
UNESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def content(agent: Agent) -> bytes:
    lines = [
        "[Unit]",
        f"Description=Warmline {agent.which.role}" + (f" ({agent.which.name})" if agent.which.name else ""),
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in agent.arguments)}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in agent.environment.items()),
        f"WorkingDirectory={_path(str(agent.home))}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={CONFIGURATION}",
        f"TimeoutStopSec={agent.exit_timeout_s}",
        f"LimitNOFILE={DESCRIPTORS}",
        "UMask=0077",
        f"StandardOutput=append:{_path(str(agent.output))}",
        f"StandardError=append:{_path(str(agent.output))}",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    return "\n".join(lines).encode()


def _quoted(word: str) -> str:
    """As one word of a unit's line, in which % introduces a specifier."""
    escaped = "".join(ESCAPES.get(character, character) for character in word).replace("%", "%%")
    return escaped if PLAIN.fullmatch(word) else f'"{escaped}"'


def _path(path: str) -> str:
    """These lines have no quotes: all up to their end is the path."""
    return path.replace("%", "%%")


def read(data: bytes) -> Installed:
    """Raises ValueError for what is no unit of an agent."""
    lines = [line.partition("=") for line in data.decode().splitlines()]
    values = {name: value for name, _, value in lines}
    try:
        pairs = [_words(value)[0].partition("=") for name, _, value in lines if name == "Environment"]
        return Installed(
            arguments=[word.replace("$$", "$") for word in _words(values["ExecStart"])],
            environment={name: value for name, _, value in pairs},
            exit_timeout_s=int(values["TimeoutStopSec"]),
        )
    except (KeyError, IndexError) as error:
        raise ValueError(f"no unit of ours: {error!r}") from None


def _words(line: str) -> list[str]:
    return [_plain(quoted if quoted or not bare else bare) for quoted, bare in WORD.findall(line)]


def _plain(word: str) -> str:
    return re.sub(r"\\(.)", lambda found: UNESCAPED.get(found[1], found[1]), word).replace("%%", "%")
