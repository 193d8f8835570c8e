"""Home of the examples in docs/cachectl.md, and their output on it.

`PYTHONPATH=tests python tests/support/cachectl/documentation.py` writes their output anew.
"""

import random
import re
import tempfile
import time
from pathlib import Path
from unittest import mock

from support.cachectl.homes import run_cachectl
from support.index.indexes import ROOT, make_home, save
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index import tree
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import RequestRecord

DOCUMENT = Path(__file__).parents[3] / "docs" / "cachectl.md"
COLUMNS = 80
EXAMPLE = re.compile(r"(```console\n\$ cachectl ([^\n#]*)[^\n]*\n)(.*?)(```)", re.DOTALL)
STEM = list(range(1000, 7000))
MISSES = (
    "",
    "differs from what is stored at token 812, in message 1 (system): a time of day is new",
    "evicted",
)


class _FixedIds:
    """Replacement of the module `secrets`, for the ids in the document."""

    def __init__(self) -> None:
        self._random = random.Random(8026)

    def token_hex(self, count: int) -> str:
        return self._random.randbytes(count).hex()


def make_documented_home(path: Path) -> Home:
    home = make_home(path)
    with mock.patch.object(tree, "secrets", _FixedIds()), Index(home, 1 << 30) as index:
        save(index, [*STEM, 1, *range(900)], checkpoints=[6000], turn_end=6001, title="Fix the parser's test")
        save(index, [*STEM, 2, *range(9000)], turn_end=6001, title="Add an option --json")
        save(index, [7] * 2500, client="opencode")
        save(index, [9] * 40)
        index.quarantine(index.match_prefix(ROOT, pack_tokens([9]), 1).chain[0].id, "checksum")
        for number, why in enumerate(MISSES * 2):
            index.record_request(_make_record(number, why))
    return home


def _make_record(number: int, why: str) -> RequestRecord:
    return RequestRecord(
        id=f"{number:024x}",
        at=time.time(),
        endpoint="chat",
        client_model="m",
        outcome="ok",
        source="cold" if number < 2 else "resident",
        why_not_warmer=why,
        prompt_tokens=6900,
        cached_tokens=0 if number < 2 else 6000,
        prefilled_tokens=6900 if number < 2 else 900,
        generated_tokens=120,
        ttft_s=0.4,
    )


def list_examples(text: str) -> list[tuple[str, str]]:
    """List the commands, without `cachectl`, and their documented output, in order."""
    return [(found[2].strip(), found[3]) for found in EXAMPLE.finditer(text)]


def run_example(home: Home, command: str) -> str:
    done = run_cachectl(home, *command.split(), columns=COLUMNS)
    return done.stdout + done.stderr


def update_examples(text: str, home: Home) -> str:
    return EXAMPLE.sub(
        lambda found: f"{found[1]}{_strip_line_ends(run_example(home, found[2].strip()))}{found[4]}", text
    )


def _strip_line_ends(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        DOCUMENT.write_text(
            update_examples(DOCUMENT.read_text(encoding="utf-8"), make_documented_home(Path(folder, "home"))), "utf-8"
        )


OURS = ("ls", "inspect", "tree", "stats", "top", "verify", "doctor", "purge", "pin", "gc")
