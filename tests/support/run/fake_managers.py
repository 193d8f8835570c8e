"""User with a home of his own, and a fake launchctl or systemctl on PATH."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from support.processes import free_port
from warmline_run.cli import app

HERE = Path(__file__).parent


class FakeUser:
    """User whose `warmline` runs in this process, with everything else as that user has it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
        self.root, self.home = root, root / "home of models"
        self.port, self.backend_port = free_port(), free_port()
        self._state = root / "manager"
        self._group = {"launchctl": "launchd", "systemctl": "service"}[tool]
        self._state.mkdir()
        self._put_on_path(tool)
        monkeypatch.setenv("HOME", str(root))
        monkeypatch.setenv("PATH", f"{root / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_MANAGER", str(self._state))
        for name in ("XDG_CONFIG_HOME", "WARMLINE_CLIENT_KEY", "WARMLINE_HOME"):
            monkeypatch.delenv(name, raising=False)
        self.then = lambda what: monkeypatch.setenv("FAKE_MANAGER_THEN", what)
        self.then("pid 4242")

    def _put_on_path(self, tool: str) -> None:
        file = self.root / "bin" / tool
        file.parent.mkdir()
        file.write_text(f"#!{sys.executable} -IS\n" + (HERE / f"fake_{tool}.py").read_text())
        file.chmod(0o700)

    def run(self, *words: str, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [self._group, *words], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    def install(self, *words: str, code: int = 0) -> Result:
        ports = ("--port", str(self.port), "--backend-port", str(self.backend_port))
        return self.run("install", "--home", str(self.home), *ports, *words, code=code)

    def status(self, code: int = 0) -> Any:
        return json.loads(self.run("status", "--json", code=code).stdout)

    @property
    def calls(self) -> list[list[str]]:
        """Recorded calls, except queries."""
        file = self._state / "calls"
        calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [call for call in calls if call[0] not in ("print", "show")]
