"""Commands: their tree and options, the settings, and how invocations end."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surface_programs import PROGRAMS, Done, Programs, Run
from surface_servers import free_port

ENTRY = re.compile(r"  (\S.*?)(?:  +(.*))?")
DEFAULT = re.compile(r"\((default: [^()]*)\)$")
NOTES = re.compile(r"\[([^\[\]]*)\]$")  # as in [env var: NAME; default: VALUE]
VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
COMMAND_WORD = re.compile(r"[a-z]+")
NO_COMMANDS = ("Usage", "Options", "Arguments")

# ---- help


def command_tree(programs: Programs, home: Path) -> dict[str, Any]:
    """Collect by command line: its usage, options and arguments with their defaults, and its subcommands."""
    found: dict[str, Any] = {}
    level = [[program] for program in PROGRAMS]
    while level:
        helps = programs.run([Run([*words, "--help"]) for words in level])
        tree = {" ".join(words): _read_help(done.stdout, home) for words, done in zip(level, helps, strict=True)}
        level = [[*name.split(), below] for name, entry in tree.items() for below in entry["commands"]]
        found |= tree
    return found


def _read_help(text: str, home: Path) -> dict[str, Any]:
    sections = _sections(text.replace(str(home), "~"))
    usage = " ".join(line.strip() for line in text.split("\n\n")[0].splitlines())
    commands = [name for title, entries in sections.items() if title not in NO_COMMANDS for name in entries]
    return {
        "usage": usage,
        "arguments": sections.get("Arguments", {}),
        "options": sections.get("Options", {}),
        "commands": sorted(commands),
    }


def _sections(text: str) -> dict[str, dict[str, list[str]]]:
    """Split help by title, with the notes of each entry, such as a default.  A blank line ends a section."""
    found: dict[str, dict[str, list[str]]] = {}
    for block in text.split("\n\n"):
        title, _, rest = block.strip("\n").partition(":\n")
        if rest and "\n" not in title and not title.startswith(" "):
            found[title] = {spec: _notes(about) for spec, about in _entries(rest.splitlines())}
    return found


def _entries(lines: Iterable[str]) -> list[tuple[str, str]]:
    """List (what is typed, its description), with wrapped lines joined."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if match := ENTRY.fullmatch(line):
            found.append((match[1], match[2] or ""))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}".strip())
    return found


def _notes(about: str) -> list[str]:
    if match := DEFAULT.search(about):
        return [match[1]]
    return match[1].split("; ") if (match := NOTES.search(about)) else []


# ---- settings

SAMPLES = {  # of settings whose default is none, or can't be given
    "home": "/tmp/surface-home",
    "served_name": "name",
    "allowed_hosts": "one.example",
    "cors_origins": "https://app.example",
    "client_key": "key",
    "stabilize": "dates",
    "adapter_path": "/tmp/adapter",
    "draft_model": "/tmp/draft",
}


def settings(programs: Programs, folder: Path) -> dict[str, Any]:
    """Collect each setting's default, and its source's name where a variable, a flag or the file gives it."""
    (plain,) = _shown(programs, [Run(["warmline", "config", "--json"])])
    given = {name: SAMPLES.get(name, _typed(entry["value"])) for name, entry in plain.items()}
    home = folder / "home-with-file"
    home.mkdir()
    in_file = {name: value for name, value in given.items() if name not in ("home", "client_key")}
    (home / "warmline.toml").write_text("".join(f"{name} = {_toml(value)}\n" for name, value in in_file.items()))
    runs = {
        "variable": Run(
            ["warmline", "config", "--json"], {f"WARMLINE_{name.upper()}": text for name, text in given.items()}
        ),
        "flag": Run(["warmline", "config", "--json", *_flags(given)]),
        "file": Run(["warmline", "config", "--json", "--home", str(home)]),
    }
    layers = dict(zip(runs, _shown(programs, list(runs.values())), strict=True))
    places = {str(folder / "user"): "~", str(home): "HOME"}
    return {
        name: {
            "default": _replaced(entry["value"], places),
            **{layer: _replaced(shown[name]["source"], places) for layer, shown in layers.items()},
        }
        for name, entry in plain.items()
    }


def _shown(programs: Programs, runs: Sequence[Run]) -> list[dict[str, Any]]:
    done = programs.run(runs)
    assert all(each.code == 0 for each in done), [each.stderr for each in done]
    return [each.json for each in done]


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(text: str) -> str:
    is_plain = text in ("true", "false") or re.fullmatch(r"\d+(\.\d+)?", text)
    return text if is_plain else "'" + text + "'"


def _flags(given: Mapping[str, str]) -> list[str]:
    """Make flags of all settings but the one that no flag sets; switches are turned on."""
    pairs = {f"--{name.replace('_', '-')}": text for name, text in given.items() if name != "client_key"}
    return [word for flag, text in pairs.items() for word in ([flag] if text in ("true", "false") else [flag, text])]


def _replaced(value: object, places: Mapping[str, str]) -> object:
    for place, name in places.items():
        value = value.replace(place, name) if isinstance(value, str) else value
    return value


# ---- invocations.  Words in capitals stand for what differs from run to run; VARIABLE=VALUE may stand before all.

BAD_USAGE = (
    "warmline",
    "warmline nosuch",
    "warmline --version",
    "warmline --nosuch",
    "warmline serve --nosuch",
    "warmline serve word",
    "warmline serve --port",
    "warmline serve --port word",
    "warmline serve --port 70000",
    "warmline serve --port 9 --backend-port 9",
    "warmline serve --reuse nosuch",
    "warmline serve --host 0.0.0.0",
    "warmline serve --home ''",
    "warmline serve --model ''",
    "warmline serve --chat-template-args word",
    "warmline serve --kv-bits 7",
    "warmline serve --stabilize nosuch",
    "warmline serve --cors-origins nosuch",
    "WARMLINE_PORT=word warmline serve",
    "WARMLINE_REUSE=nosuch warmline config",
    "WARMLINE_CLIENT_KEY=' spaces ' warmline config",
    "WARMLINE_NOSUCH=1 warmline config",
    "warmline config",
    "warmline config --json",
    "warmline config --home BAD_TOML",
    "warmline config --home UNKNOWN_KEY",
    "warmline proxy --home FILE --port FREE --backend-port FREE",
    "warmline proxy --nosuch",
    "warmline backend --nosuch",
    "warmline doctor --nosuch",
    "warmline doctor ''",
    "warmline doctor --memory-gb -1",
    "warmline gates --list",
    "warmline gates --only nosuch",
    "warmline gates --url nosuch",
    "warmline gates --turns 1",
    "warmline gates --url http://127.0.0.1:FREE/v1",
    "warmline gates --url http://127.0.0.1:FREE/v1 --json",
    "warmline launchd",
    "warmline launchd nosuch",
    "warmline launchd install --out FOLDER",
    "warmline service",
    "warmline service nosuch",
    "warmline service install --out FOLDER",
    "warmline service install --dry-run",
    "warmline service install --name 'bad name' --dry-run",
    "warmline service restart nosuch",
    "cachectl",
    "cachectl nosuch",
    "cachectl --version",
    "cachectl --nosuch",
    "cachectl ls --nosuch",
    "cachectl key",
    "cachectl key nosuch",
    "cachectl ls --home FILE",
)
ON_ANY_HOME = (
    "cachectl ls",
    "cachectl ls --json",
    "cachectl ls 0123abcd",
    "cachectl inspect",
    "cachectl inspect 0123abcd",
    "cachectl tree",
    "cachectl tree --depth -1",
    "cachectl stats",
    "cachectl stats --json",
    "cachectl explain",
    "cachectl explain 0123abcd",
    "cachectl diff",
    "cachectl diff 0123abcd 4567abcd",
    "cachectl top --once",
    "cachectl verify",
    "cachectl verify --deep",
    "cachectl verify --repair",
    "cachectl verify --replay",
    "cachectl verify 0123abcd",
    "cachectl verify --replay --repair",
    "cachectl doctor",
    "cachectl doctor --json",
    "cachectl purge",
    "cachectl purge --all",
    "cachectl purge --all --dry-run",
    "cachectl purge --all --yes",
    "cachectl purge --all --model m",
    "cachectl purge --older-than nosuch",
    "cachectl purge --key nosuch --yes",
    "cachectl pin",
    "cachectl pin 0123abcd",
    "cachectl gc",
    "cachectl gc --to-gb -1",
    "cachectl gc --to-gb nan",
    "cachectl export",
    "cachectl export 0123abcd OUT",
    "cachectl import",
    "cachectl import NOWHERE",
    "cachectl import FILE",
    "cachectl key list",
    "cachectl key list --json",
    "cachectl key show",
    "cachectl key show nosuch",
    "cachectl key rotate nosuch",
    "cachectl key remove nosuch",
    "cachectl key remove nosuch --purge",
)
KEYS = (  # one after the other
    "cachectl key add laptop",
    "cachectl key add laptop --json",
    "cachectl key add phone --json",
    "cachectl key add 'bad name!'",
    "cachectl key add ''",
    "cachectl key add admin",
    "cachectl key list",
    "cachectl key list --json",
    "cachectl key show",
    "cachectl key show laptop",
    "cachectl key show laptop --json",
    "cachectl key show admin --json",
    "cachectl key rotate laptop --json",
    "cachectl key rotate nosuch",
    "cachectl key remove nosuch",
    "cachectl key remove laptop --json",
    "cachectl key remove phone --purge --json",
    "cachectl key remove admin --json",
)
LOOKING = (  # while the pair runs, and after it has stopped
    "cachectl ls",
    "cachectl ls --json",
    "cachectl ls SESSION --json",
    "cachectl ls 01",
    "cachectl ls SEGMENT",
    "cachectl ls ffffffffffffffff",
    "cachectl inspect",
    "cachectl inspect --json",
    "cachectl inspect SESSION --json",
    "cachectl inspect SEGMENT --json",
    "cachectl tree",
    "cachectl tree --json",
    "cachectl tree --depth 1 --json",
    "cachectl stats",
    "cachectl stats --json",
    "cachectl explain",
    "cachectl explain --json",
    "cachectl explain REQUEST",
    "cachectl explain REQUEST --json",
    "cachectl explain nosuch",
    "cachectl diff SESSION OTHER",
    "cachectl diff SESSION OTHER --json",
    "cachectl diff SESSION SESSION --json",
    "cachectl diff SESSION nosuch",
    "cachectl verify",
    "cachectl verify --json",
    "cachectl verify --deep --json",
    "cachectl doctor --json",
    "cachectl purge --session SESSION",
    "cachectl purge --session SESSION --dry-run --json",
    "cachectl purge --model nosuch --yes",
    "cachectl purge --older-than 1d --yes",
    "cachectl top --once",
    "cachectl top --json",
)
CHANGING = (  # likewise, one after the other
    "cachectl pin SESSION --json",
    "cachectl pin SESSION --off --json",
    "cachectl pin nosuch",
    "cachectl verify --repair --json",
    "cachectl gc --json",
    "cachectl export SESSION ARCHIVE --json",
    "cachectl export SESSION ARCHIVE --json --force",
    "cachectl export SESSION ARCHIVE",
    "cachectl export SESSION -",
    "cachectl export SESSION - --json",
    "cachectl export SESSION NOWHERE/file",
    "cachectl purge --session SESSION --yes --json",
    "cachectl import ARCHIVE --json",
    "cachectl import ARCHIVE --json --key nosuch",
    "cachectl import FILE",
    "cachectl purge --all --dry-run --json",
)
ONLY_RUNNING = (
    "cachectl verify --replay --json",
    "warmline serve --home HOME --model MODEL --port PORT --backend-port FREE",
    "warmline gates --url http://127.0.0.1:PORT --only load --json",
    "warmline gates --url http://127.0.0.1:PORT --only load",
    "warmline gates --url http://127.0.0.1:PORT --only restart --strict --json",
    "warmline doctor MODEL --json",
)
ONLY_STOPPED = (
    "cachectl verify --replay",
    "cachectl purge --all --yes --json",
    "cachectl ls --json",
    "cachectl explain --json",
)
SLOW = {  # each waits for a lock, or imports a lot
    "warmline proxy --home HELD --port FREE --backend-port FREE": "the home is held",
    "warmline backend --home HELD --model MODEL --backend-port FREE": "the home is held",
    "warmline serve --home OTHER_HOME --model NOWHERE --port FREE --backend-port FREE": "the model is missing",
    "warmline doctor NOWHERE": "the model is missing",
}
# Whether something is found there depends on the machine.
UNSTABLE = ("cachectl doctor --json",)


def prepared(line: str, values: Mapping[str, str]) -> Run:
    """Replace the words in capitals of a line."""
    words, environment = shlex.split(line), {}
    while match := VARIABLE.fullmatch(words[0]):
        environment[match[1]] = match[2]
        words = words[1:]
    return Run([_filled(word, values) for word in words], environment)


def _filled(word: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return str(free_port()) if match[0] == "FREE" else values.get(match[0], match[0])

    return re.sub(r"[A-Z][A-Z_]+", value, word)


def ending(done: Done) -> str:
    """Describe the exit code, and where something was printed."""
    streams = [name for name, text in (("stdout", done.stdout), ("stderr", done.stderr)) if text]
    return " ".join([str(done.code), *streams])
