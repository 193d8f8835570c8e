"""docs/newcomer.sh as it stands, with the demo model; a systemctl of ours runs exactly what the units say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.processes import free_port

ROOT = Path(__file__).parents[2]
STEPS = [
    "Install",
    "Serve",
    "Connect a client",
    "See it warm",
    "Find why",
    "Keep it as a service",
    "Purge",
    "Uninstall",
]
CONSTRAINTS = ("requirements/lock.txt", "requirements/newcomer.txt")
TIMEOUT_S = 240


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_systemctl(folder: Path) -> None:
    manager = folder / "systemctl"
    folder.mkdir()
    fake = (ROOT / "tests" / "support" / "run" / "fake_systemctl.py").read_text()
    manager.write_text(f"#!{sys.executable} -IS\n{fake}")
    manager.chmod(0o700)


def test_newcomer_script_succeeds(tmp_path: Path) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv, "`make setup` installs uv"
    install_systemctl(tmp_path / "bin")
    (tmp_path / "manager").mkdir()
    own = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),  # uv's and pip's downloads
        "FAKE_MANAGER": str(tmp_path / "manager"),
        "SOURCE": str(build_wheel(tmp_path / "dist")),
        "PORT": str(free_port()),
        "BACKEND_PORT": str(free_port()),
        "UV": uv,
        "UV_PYTHON": sys.executable,
        "UV_CONSTRAINT": " ".join(str(ROOT / path) for path in CONSTRAINTS),
        "WARMLINE_SPECULATION": "off",  # nothing is measured for drafts, which takes seconds
    }
    left_out = ("WARMLINE_", "XDG_", "UV_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
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
    assert [step for step, line in zip([*STEPS, "Done"], headings, strict=True) if not line.startswith(step)] == []
    home = re.search(r"writing the demo model to (\S+)/models/", done.stdout)
    assert home and not Path(home[1]).parent.exists(), "it removes all that it has installed and stored"
