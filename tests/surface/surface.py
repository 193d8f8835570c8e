"""Collector of all that users see of Warmline, from outside: commands, settings, exit codes, routes, answers, metrics,
logs and files.  What is compared with golden files has no prose, versions, ports, ids or times.

Usage, with the folders tests and tests/pair of a checkout on PYTHONPATH and its interpreter:

    python surface.py --write   # make the golden files
    python surface.py           # compare with them; the exit code is 1 where anything differs
"""

import argparse
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import surface_answers as answers
import surface_commands as commands
import surface_routes as routes
from surface_answers import Ports
from surface_programs import Done, Programs, executable
from surface_servers import Server, ask, free_port, plain_environment
from surface_shapes import json_logs, metrics, perf_line, shape, without_ids

from support.tiny_models import build

GOLDEN = Path(__file__).with_name("golden")
LINE_CHARS = 110
SLOW_TIMEOUT_S = 120.0
CLIENT_KEY = "surface-client-key"
# Differ from run to run: what was still in memory when a request came, how long it waited, and how far another was when
# it was cancelled.
UNSTABLE = re.compile(
    r"explain REQUEST|explain --json > since|why_not_warmer\.|sources\.shared|waits\[\]|warmline_cancels_total > labels"
    r"|chat, events > chat\.completion\.chunk$"
)
TEMPORARY = re.compile(r"\S*/surface-\s?\w+/user|\b\d+:\d+:\d+:\d+\b")
Section = dict[str, Any]


def collect() -> dict[str, Section]:
    """By section, which is a golden file each."""
    with tempfile.TemporaryDirectory(prefix="surface-") as folder, ExitStack() as stack:
        return _Collector(Path(folder), stack).collect()


class _Collector:
    """Collector of one run: a pair without keys, a proxy with keys and without a backend, and many commands."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        user = folder / "user"
        user.mkdir()
        self._environment = plain_environment(user)
        self._programs = Programs(self._environment, folder)
        stack.callback(self._programs.close)
        self._home = folder / "home"
        self._values = self._prepared()
        self.sections: dict[str, Section] = {"exit_codes": {}, "cachectl_json": {}}

    def collect(self) -> dict[str, Section]:
        alone, port = self._proxy_alone()
        model = build("llama", self._folder / "model", tools=True)
        pair, ports = self._pair(model)
        with self._slow_runs():
            self._commands()
            alone.wait(port, "/health")
            self._keyed(alone, port)
            pair.wait(ports.proxy, "/ready")
            self._running(ports)
            self.sections["exit_codes"]["signals"] = {"pair, SIGTERM": pair.stop(), "proxy, SIGTERM": alone.stop()}
            self.sections["logs"] = {
                "json": json_logs(pair.log.read_text().splitlines()),
                "perf": perf_line(next(line for line in alone.log.read_text().splitlines() if "PERF " in line)),
            }
            self.sections["files"]["after the end"] = _files(self._home)
            self._stopped()
        return self.sections

    # ---- what runs

    def _prepared(self) -> dict[str, str]:
        """Files and folders that commands are told to use, by the words that stand for them."""
        values = {name: self._folder / name.lower() for name in ("EMPTY", "BAD_TOML", "UNKNOWN_KEY", "HELD", "FILE")}
        more = {name: self._folder / name.lower() for name in ("NOWHERE", "OTHER_HOME", "OUT", "KEYS_HOME", "ARCHIVE")}
        for name in ("EMPTY", "BAD_TOML", "UNKNOWN_KEY", "HELD"):
            values[name].mkdir()
        values["FILE"].write_text("no archive, and no folder\n")
        (values["BAD_TOML"] / "warmline.toml").write_text("port = word\n")
        (values["UNKNOWN_KEY"] / "warmline.toml").write_text("nosuch = 1\n")
        named = {"FOLDER": self._folder, "MODEL": self._folder / "model", "HOME": self._home}
        return {name: str(path) for name, path in {**values, **more, **named}.items()}

    def _server(self, arguments: Sequence[str], name: str, **environment: str) -> Server:
        server = Server(arguments, {**self._environment, **environment}, self._folder / f"{name}.log")
        self._stack.callback(server.kill)
        return server

    def _pair(self, model: Path) -> tuple[Server, Ports]:
        port, backend = free_port(), free_port()
        places = ["--home", str(self._home), "--model", str(model), "--port", str(port), "--backend-port", str(backend)]
        options = ["--audit-fraction", "0", "--log-format", "json", "--log-level", "debug"]
        self._home.mkdir(mode=0o700)
        server = self._server(["serve", *places, *options], "pair")
        self._values |= {"PORT": str(port)}
        return server, Ports(port, backend, "")

    def _proxy_alone(self) -> tuple[Server, int]:
        port = free_port()
        places = ["--home", self._values["KEYS_HOME"], "--port", str(port), "--backend-port", str(free_port())]
        options = ["--admin-needs-key", "--cors-origins", "https://app.example", "--connect-timeout-s", "0.2"]
        server = self._server(["proxy", *places, *options], "proxy", WARMLINE_CLIENT_KEY=CLIENT_KEY)
        return server, port

    @contextmanager
    def _slow_runs(self) -> Iterator[None]:
        """Begun before all else, with locks held as another process would."""
        with _held(Path(self._values["HELD"])):
            running = {}
            for line, why in commands.SLOW.items():
                run = commands.prepared(line, self._values)
                output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                words = [executable(run.words[0]), *run.words[1:]]
                running[f"{line}: {why}"] = subprocess.Popen(words, text=True, env=self._environment, **output)
            yield
            self.sections["exit_codes"]["slow"] = {name: _ending(process) for name, process in running.items()}

    # ---- what is collected

    def _run(self, group: str, lines: Sequence[str], *, home: str = "", in_order: bool = False) -> None:
        """Run commands; note how each ends, and the keys of the JSON that it prints."""
        values = self._values
        runs = [commands.prepared(line, values) for line in lines]
        for run in runs:
            run.environment.update({"WARMLINE_HOME": home} if home else {})
        batches = [[run] for run in runs] if in_order else [runs]
        done = [each for batch in batches for each in self._programs.run(batch)]
        for line, each in zip(lines, done, strict=True):
            self._note(group, line, each)

    def _note(self, group: str, line: str, done: Done) -> None:
        if not (line in commands.UNSTABLE and done.code in (0, 1)):
            self.sections["exit_codes"].setdefault(group, {})[line] = commands.ending(done)
        if "--json" in line and done.json is not None:
            self.sections["cachectl_json"].setdefault(group, {})[line] = shape(done.json)

    def _commands(self) -> None:
        user = Path(self._environment["HOME"])
        self.sections["commands"] = commands.command_tree(self._programs, user)
        self.sections["settings"] = commands.settings(self._programs, self._folder)
        self._run("usage", commands.BAD_USAGE)
        for group, home in (("no home", "NOWHERE"), ("empty home", "EMPTY")):  # in order: an import creates an index
            self._run(group, commands.ON_ANY_HOME, home=self._values[home], in_order=True)
        self._run("keys", commands.KEYS, home=str(self._folder / "keys"), in_order=True)

    def _keyed(self, alone: Server, port: int) -> None:
        """Answers where keys are required, and no backend serves."""
        home = Path(self._values["KEYS_HOME"])
        show = commands.prepared("cachectl key show admin --home KEYS_HOME", self._values)
        admin = self._programs.run([show])[0].stdout.strip()
        keys = {"client": CLIENT_KEY, "admin": admin, "secret": _secret(home), "wrong": "wrong"}
        ask(port, "GET", "/ready")
        self.sections["routes_with_keys"] = routes.collect_answers(port, routes.keyed_cases(keys), routes.PROXY_HEADERS)
        self.sections["files"] = {"of a proxy with keys": _files(home)}

    def _running(self, ports: Ports) -> None:
        ports = replace(ports, secret=_secret(self._home))
        owner = ports.as_owner
        self.sections["routes_of_proxy"] = {
            "paths": routes.matrix(ports.proxy, routes.PROXY_PATHS, routes.AS_ADMIN, routes.PROXY_HEADERS),
            "cases": routes.collect_answers(ports.proxy, routes.proxy_cases(), routes.PROXY_HEADERS),
        }
        by_secret = {
            name: (method, path, body, {**headers, **owner})
            for name, (method, path, body, headers) in routes.backend_cases().items()
        } | routes.backend_cases_by_secret(ports.secret)
        self.sections["routes_of_backend"] = {
            "paths": routes.matrix(ports.backend, routes.BACKEND_PATHS, owner, routes.BACKEND_HEADERS),
            "cases": routes.collect_answers(ports.backend, by_secret, routes.BACKEND_HEADERS),
        }
        self.sections["answers_to_clients"] = answers.client_answers(ports) | answers.stored_requests(ports)
        self._name_what_is_stored(ports)
        self.sections["answers_to_owner"] = answers.owner_answers(
            ports, self._values["SESSION"], self._values["SEGMENT"]
        )
        self.sections["answers_of_backend"] = answers.backend_answers(ports) | answers.transfers(ports)
        self.sections["metrics"] = {
            "proxy": metrics(ask(ports.proxy, "GET", "/metrics").body.decode()),
            "backend": metrics(ask(ports.backend, "GET", "/metrics", None, owner).body.decode()),
        }
        self.sections["files"] |= {"while it runs": _files(self._home), "contents": _contents(self._home)}
        self._run("running", (*commands.LOOKING, *commands.ONLY_RUNNING), home=str(self._home))
        self._run("running, changes", commands.CHANGING, home=str(self._home), in_order=True)
        self.sections["files"]["an archive"] = _archive(Path(self._values["ARCHIVE"]))
        ports.settle()

    def _name_what_is_stored(self, ports: Ports) -> None:
        """Set the ids that commands need."""
        sessions = ask(ports.proxy, "GET", "/warmline/sessions?sort=-tokens").json["sessions"]
        session, other = sessions[1]["id"], sessions[2]["id"]  # two that share a beginning: the longest is another
        listed = self._programs.run([commands.prepared(f"cachectl ls {session} --json --home HOME", self._values)])[0]
        request = ask(ports.proxy, "GET", "/warmline/requests?count=1").json["requests"][0]["id"]
        segment = listed.json["segments"][0]["id"]
        self._values |= {"SESSION": session, "OTHER": other, "SEGMENT": segment, "REQUEST": request}

    def _stopped(self) -> None:
        home = str(self._home)
        self._run("stopped", commands.LOOKING, home=home)
        self._run("stopped, changes", (*commands.CHANGING, *commands.ONLY_STOPPED), home=home, in_order=True)


def _secret(home: Path) -> str:
    return (home / "secret").read_text().strip()


def _ending(process: "subprocess.Popen[str]") -> str:
    stdout, stderr = process.communicate(timeout=SLOW_TIMEOUT_S)
    return commands.ending(Done(process.returncode, stdout, stderr))


@contextmanager
def _held(home: Path) -> Iterator[None]:
    """Hold the locks of the home's proxy and backend."""
    (home / "run").mkdir()
    with (home / "home.lock").open("w") as one, (home / "run" / "backend.lock").open("w") as other:
        for lock in (one, other):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- files


def _files(home: Path) -> dict[str, str]:
    """List files by path, without ids: the mode, and whether it is a folder."""
    return {_place(home, path): _mode(path) for path in (home, *sorted(home.rglob("*")))}


def _place(home: Path, path: Path) -> str:
    parts = ["XX" if len(part) == 2 else without_ids(part) for part in path.relative_to(home).parts]
    return "/".join(parts) or "."


def _mode(path: Path) -> str:
    return stat.filemode(path.stat().st_mode)


def _contents(home: Path) -> Section:
    """List the keys of JSON files, and the header fields of a segment's file besides tensors."""
    json_files: Section = {
        _place(home, path): shape(json.loads(path.read_text())) for path in sorted(home.rglob("*.json"))
    }
    headers = [_header(path) for path in sorted((home / "segments").rglob("*.safetensors"))]
    tensors = {name: value for header in headers for name, value in header.items() if name != "__metadata__"}
    return {
        **json_files,
        "metadata of segments": shape(*(header["__metadata__"] for header in headers)),
        "tensors of segments": {name: tensors[name]["dtype"] for name in sorted(tensors)},
    }


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return dict(json.loads(file.read(int.from_bytes(file.read(8), "little"))))


def _archive(path: Path) -> Section:
    """List the names in an exported archive, and the keys of its JSON files."""
    shapes: Section = {"mode": _mode(path)}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            data = file.read() if file and member.name.endswith(".json") else b""
            shapes[without_ids(member.name)] = shape(json.loads(data)) if data else "file"
    return shapes


# ---- golden files


def golden(section: str) -> Section:
    return dict(json.loads(mask((GOLDEN / f"{section}.json").read_text())))


def mask(text: str) -> str:
    """JSON text without temporary paths, inodes and times of files."""
    return TEMPORARY.sub("~", text)


def collect_masked() -> dict[str, Section]:
    return dict(json.loads(mask(json.dumps(collect(), ensure_ascii=False))))


def sections() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


def as_text(value: Any, indent: str = "") -> str:
    """JSON that is read and compared line by line: what is short stands on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict) or not value or len(indent) + len(line) <= LINE_CHARS:
        return line
    inner = indent + " "
    rows = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {as_text(below, inner)}" for key, below in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """List a line for each value that is missing (-), new (+), or another (both)."""
    if UNSTABLE.search(path):
        return []
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [*expected, *(name for name in found if name not in expected)]
        return [line for name in names for line in _difference(expected, found, name, path)]
    return [] if expected == found else [f"- {path}: {expected}", f"+ {path}: {found}"]


def _difference(expected: Mapping[str, Any], found: Mapping[str, Any], name: str, path: str) -> list[str]:
    below = f"{path} > {name}" if path else name
    if UNSTABLE.search(below):
        return []
    if name not in found:
        return [f"- {below}: {expected[name]}"]
    if name not in expected:
        return [f"+ {below}: {found[name]}"]
    return differences(expected[name], found[name], below)


def _write(found: Mapping[str, Section]) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for path in GOLDEN.glob("*.json"):
        path.unlink()
    for section, value in found.items():
        (GOLDEN / f"{section}.json").write_text(as_text(value) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what users see with the golden files, or write these.")
    parser.add_argument("--write", action="store_true", help="write the golden files")
    began = time.monotonic()
    wanted, found = parser.parse_args(), collect_masked()
    used = os.times()
    print(f"collected in {time.monotonic() - began:.1f} s, {sum(used[:4]):.1f} s of CPU", file=sys.stderr)
    if wanted.write:
        _write(found)
        return 0
    lines = differences({section: golden(section) for section in sections()}, found)
    print("\n".join(lines) or "all as in the golden files")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
