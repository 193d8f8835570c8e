"""Commands of the documentation: the lines of its ```sh blocks.

A block is bash.  WORDS stand for what the reader has: ids of what is stored.  What is printed comes in other blocks,
and in ```console blocks what somebody typed, after a `$`, with what came of it.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("launchd/*.md")])
WORDS = ("SESSION", "OTHER", "SEGMENT", "REQUEST")

OURS = ("warmline", "cachectl", "make", "docs/newcomer.sh")
# Programs of others that can't, or must not, run here; what they would be told is written down.
OTHERS = ("aider", "brew", "caffeinate", "claude", "codex", "git", "hermes", "hf", "journalctl", "launchctl", "llm")
OTHERS += (
    "loginctl",
    "mlx_lm.convert",
    "opencode",
    "pipx",
    "pmset",
    "sudo",
    "systemctl",
    "tailscale",
    "tb",
    "tmutil",
    "uv",
    "uvx",
    "xcode-select",
)
SHELL = ("curl", "python3?", "pip", "export", "cd", "ssh", "scp", "rm", "open", "sysctl")

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OTHER_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = "|".join([*map(re.escape, (*OURS, *OTHERS)), *SHELL])
_MAY_GO_ON = re.compile(r"""['"`(){}<\\|&]|\b(?:if|for|while|until|case)\b""")
_COMMAND = re.compile(rf"(\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?({_PROGRAMS}) [^ ]")


@dataclass(frozen=True)
class Command:
    """Command of a block, with its continuation lines; `line` is its number in the document."""

    text: str
    line: int


def has_commands(text: str) -> bool:
    return bool(_BLOCK.search(text))


def list_commands(text: str) -> list[Command]:
    """List the commands in order.  A line continues after a backslash, within quotes, and within a heredoc."""
    found = []
    for block in _BLOCK.finditer(text):
        at = text.count("\n", 0, block.start(1)) + 1
        lines: list[str] = []
        for number, line in enumerate(block[1].splitlines(), at):
            lines.append(line)
            if _is_complete("\n".join(lines)):
                command = "\n".join(lines).strip()
                if command and not command.startswith("#"):
                    found.append(Command(command, number - len(lines) + 1))
                lines = []
        if lines:
            raise ValueError(f"line {at}: a command has no end: {lines[0]}")
    return found


def find_commands_outside_blocks(text: str) -> list[str]:
    """Find lines of indented and other fenced blocks that look like commands, and ```sh outside of blocks.

    In ```console blocks programs of others may be typed.
    """
    rest = _BLOCK.sub("", text)
    found = [line for line in rest.splitlines() if "```sh" in line]
    for block in _OTHER_BLOCK.finditer(rest):
        found += [line for line in block[2].splitlines() if _is_command(line, is_transcript=block[1] == "console")]
    indented = [line[4:] for line in _OTHER_BLOCK.sub("", rest).splitlines() if line.startswith("    ")]
    return [*found, *filter(_is_command, indented)]


def _is_command(line: str, is_transcript: bool = False) -> bool:
    found = _COMMAND.match(line)
    is_cut = line.endswith("...")  # and so only shown
    return bool(found) and not is_cut and not (is_transcript and found[1] and found[2] in OTHERS)


def _is_complete(text: str) -> bool:
    """Ask bash whether the command is complete; only where it may be incomplete."""
    if text.rstrip().endswith("\\"):
        return False
    if not _MAY_GO_ON.search(text):
        return True
    parsed = subprocess.run(["bash", "-n", "-c", text], capture_output=True)
    return parsed.returncode == 0 and not parsed.stderr
