"""An agent as a systemd user unit, and back.  Pure."""

import re

from warmline_run.services.manager import InstalledService
from warmline_run.services.service import ServiceProcess

RESTART_S = 5
DESCRIPTORS = 8192
CONFIGURATION_EXIT_CODE = 2  # the exit code that starting again does not help
UNQUOTED_PATTERN = re.compile(r"[\w@+=:,./~-]+", re.ASCII)
WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
UNESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def render_unit(process: ServiceProcess) -> bytes:
    lines = [
        "[Unit]",
        f"Description=Warmline {process.service_id.role}"
        + (f" ({process.service_id.name})" if process.service_id.name else ""),
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_quote_word(word).replace('$', '$$') for word in process.arguments)}",
        *(f"Environment={_quote_word(f'{name}={value}')}" for name, value in process.environment.items()),
        f"WorkingDirectory={_escape_path(str(process.home))}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={CONFIGURATION_EXIT_CODE}",
        f"TimeoutStopSec={process.exit_timeout_s}",
        f"LimitNOFILE={DESCRIPTORS}",
        "UMask=0077",
        f"StandardOutput=append:{_escape_path(str(process.output))}",
        f"StandardError=append:{_escape_path(str(process.output))}",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    return "\n".join(lines).encode()


def _quote_word(word: str) -> str:
    """As one word of a unit's line, in which % introduces a specifier."""
    escaped = "".join(ESCAPES.get(character, character) for character in word).replace("%", "%%")
    return escaped if UNQUOTED_PATTERN.fullmatch(word) else f'"{escaped}"'


def _escape_path(path: str) -> str:
    """These lines have no quotes: all up to their end is the path."""
    return path.replace("%", "%%")


def parse_unit(data: bytes) -> InstalledService:
    """Raises ValueError for what is no unit of an agent."""
    lines = [line.partition("=") for line in data.decode().splitlines()]
    values = {name: value for name, _, value in lines}
    try:
        pairs = [_split_words(value)[0].partition("=") for name, _, value in lines if name == "Environment"]
        return InstalledService(
            arguments=[word.replace("$$", "$") for word in _split_words(values["ExecStart"])],
            environment={name: value for name, _, value in pairs},
            exit_timeout_s=int(values["TimeoutStopSec"]),
        )
    except (KeyError, IndexError) as error:
        raise ValueError(f"no unit of ours: {error!r}") from None


def _split_words(line: str) -> list[str]:
    return [_unescape_word(quoted if quoted or not bare else bare) for quoted, bare in WORD.findall(line)]


def _unescape_word(word: str) -> str:
    return re.sub(r"\\(.)", lambda found: UNESCAPES.get(found[1], found[1]), word).replace("%%", "%")
