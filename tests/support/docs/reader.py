"""Reader of the documentation: a checkout, a home folder with models, a pair that serves, and a bash to type into."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support.docs.commands import OTHERS, ROOT, WORDS, Command, list_commands
from support.pair.pair import FolderOf, Pair
from support.processes import free_port

MODELS = {"my-model": "llama", "GLM-5.2-mxfp4": "glm_moe_dsa"}
STAND_INS = ("cachectl", "warmline", "make", "python", *OTHERS)
MANAGERS = ("launchctl", "systemctl")
# These tell by their exit code that they found something, as they may on any machine.
MAY_FIND = re.compile(r"^(\S*/)?(cachectl|warmline) doctor\b")
TIMEOUT_S = 120
HOST = "studio.local"  # as the documentation calls a machine in a LAN


class CommandFailedError(Exception):
    """Command of a document that fails."""


class DocumentReader:
    """Reader whose commands change nothing outside of `folder` and the pair's home."""

    def __init__(self, folder: Path, pair: Pair, model_folder: FolderOf) -> None:
        self._folder, self._pair = folder, pair
        self._checkout, self._home, self._programs = folder / "warmline", folder / "home", folder / "programs"
        self._ports = f"{free_port()} {free_port()}"
        self._address = str(Path(tempfile.mkdtemp(prefix="reader-"), "socket"))  # a short path, as sockets want it
        self._make_checkout()
        (self._home / "models").mkdir(parents=True)
        for name, family in MODELS.items():
            (self._home / "models" / name).symlink_to(model_folder(family))
        # An answer that is an error is a command that failed; a name in a LAN is this machine.
        (self._home / ".curlrc").write_text(
            f'fail-with-body\nsilent\nshow-error\nmax-time = 60\nresolve = "{HOST}:{pair.port}:127.0.0.1"\n'
        )

    def _make_checkout(self) -> None:
        environment = self._checkout / ".venv" / "bin"
        environment.mkdir(parents=True)
        self._programs.mkdir()
        here = Path(__file__)
        for name in STAND_INS:
            _write_program(environment / name, here.with_name("stand_in.py"))
        for name in MANAGERS:
            _write_program(environment / name, here.parents[1] / "run" / f"fake_{name}.py")
        for shared in ("benchmarks", "docs"):
            (self._checkout / shared).symlink_to(ROOT / shared)
        (self._folder / "manager").mkdir()

    def __enter__(self) -> "DocumentReader":
        server = Path(__file__).with_name("fork_server.py")
        pipe = subprocess.PIPE
        self._server = subprocess.Popen([sys.executable, server, self._address], stdin=pipe, stdout=pipe)
        assert self._server.stdout is not None and self._server.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.communicate()  # ends its input, and so itself
        shutil.rmtree(Path(self._address).parent)

    def type_commands(self, document: Path) -> None:
        """Type all commands of a document into one bash; CommandFailedError, with the line, at the first failure."""
        commands = list_commands(document.read_text(encoding="utf-8"))
        done = subprocess.run(
            ["bash", "-c", self._make_script(commands, self._store_conversations(document.name))],
            cwd=self._checkout,
            env=self._make_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            _, _, last = done.stderr.rpartition("@command ")
            failed = commands[int(last.split()[0])]
            output = f"{done.stdout[-2000:]}\n{last[-2000:]}"
            raise CommandFailedError(f"line {failed.line}: {failed.text}\nexit code {done.returncode}\n{output}")

    def _make_script(self, commands: list[Command], ids: dict[str, str]) -> str:
        lines = ["set -eo pipefail"]
        for number, command in enumerate(commands):
            text = command.text.replace(":8026", f":{self._pair.port}").replace(":8025", f":{self._pair.backend_port}")
            text = re.sub(rf"\b({'|'.join(WORDS)})\b", lambda found: ids[found[1]], text)
            if MAY_FIND.match(text):
                text = f"{{ {text}\n}} || [ $? = 1 ]"
            lines += [f"echo '@command {number}' >&2", text]
        return "\n".join(lines)

    def _store_conversations(self, topic: str) -> dict[str, str]:
        """Store two conversations for this document, one of them of two turns; their ids."""
        opening = [{"role": "system", "content": f"You answer questions on {topic} in one sentence. " * 4}]
        request = ""
        for subject in ("a lighthouse", "a ferry"):
            messages = [*opening, {"role": "user", "content": subject}]
            answer = self._pair.chat(messages, max_tokens=4).text
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
            request = self._pair.chat(messages, max_tokens=4).headers["X-Warmline-Request"]
        self._pair.settle()
        session, other = (row["id"] for row in self._pair.cachectl("ls")["sessions"][:2])
        segment = self._pair.cachectl("inspect", session)["path"][0]["id"]
        return dict(zip(WORDS, (session, other, segment, request), strict=True))

    def _make_environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARMLINE_", "XDG_"))}
        return {
            **kept,
            "PATH": f"{self._checkout / '.venv' / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self._home),
            "WARMLINE_HOME": str(self._pair.home.root),
            "WARMLINE_PORT": str(self._pair.port),
            "WARMLINE_BACKEND_PORT": str(self._pair.backend_port),
            "STAND_IN_ROOT": str(ROOT),
            "STAND_IN_LOG": str(self._folder / "others.log"),
            "STAND_IN_PORTS": self._ports,
            "STAND_IN_SERVER": self._address,
            "FAKE_MANAGER": str(self._folder / "manager"),
            "FAKE_MANAGER_THEN": f"pid {os.getpid()}",
        }

    def remove_keys(self) -> None:
        """Delete state of a document that would disturb another: one key is enough to require keys."""
        if (keys := self._pair.home.keys).exists():  # a proxy whose file is gone goes on asking for the keys
            keys.write_text('{"keys": []}')


def _write_program(path: Path, source: Path) -> None:
    path.write_text(f"#!{sys.executable} -IS\n{source.read_text(encoding='utf-8')}", "utf-8")
    path.chmod(0o755)
