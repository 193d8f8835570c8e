"""docs/newcomer.sh as it stands, with a tiny model; a systemctl of ours runs exactly what the units say."""

import os
import subprocess
import sys
from pathlib import Path

from support.pair.pair import FolderOf
from support.processes import free_port

ROOT = Path(__file__).parents[2]
STEPS = ["Install", "Serve", "Point a client", "See it warm", "Keep it as a service", "Remove what was stored"]
TIMEOUT_S = 180


def test_newcomer_script_succeeds(tmp_path: Path, tiny_folder: FolderOf) -> None:
    manager = tmp_path / "bin" / "systemctl"
    manager.parent.mkdir()
    fake = (ROOT / "tests" / "support" / "run" / "fake_systemctl.py").read_text()
    manager.write_text(f"#!{sys.executable} -IS\n{fake}")
    manager.chmod(0o700)
    (tmp_path / "manager").mkdir()
    own = {
        "PATH": f"{manager.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "FAKE_MANAGER": str(tmp_path / "manager"),
        "MODEL": str(tiny_folder("llama")),
        "HOME_DIR": str(tmp_path / "home"),
        "PORT": str(free_port()),
        "BACKEND_PORT": str(free_port()),
    }
    if Path(sys.prefix) != ROOT / ".venv":  # else it is the one that the script means
        own["BIN"] = str(Path(sys.executable).parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WARMLINE_", "XDG_"))}
    done = subprocess.run(
        [ROOT / "docs" / "newcomer.sh"],
        env={**environment, **own},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    headings = [line.removeprefix("== ") for line in done.stdout.splitlines() if line.startswith("== ")]
    assert [step for step, line in zip(STEPS, headings, strict=True) if not line.startswith(step)] == []
    assert not list((tmp_path / "home" / "segments").rglob("*.safetensors"))
