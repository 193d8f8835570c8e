"""Messages are decoded on many threads, and what a struct is made of must be known before two of them meet it at once.

msgspec 0.22 ends the process (SIGSEGV) where two threads decode into a struct that neither has met: restores after a
start did, which read the headers of their files beside each other.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2]
DECODE = "messages.py"  # whose `decode` sees to it

RACE = """
import sys, threading
from typing import Literal
import msgspec
from warmline_wire.messages import decode

sys.setswitchinterval(1e-6)
names = {"msgspec": msgspec, "Literal": Literal}
for _ in range(100):
    exec('''
class Meta(msgspec.Struct):
    kind: Literal["a", "b"]
    start: int
    other: Literal["b", "c"] | None
    spans: list[int]
''', names)
    together = threading.Barrier(8)
    def meet():
        together.wait()
        decode(b'{"kind": "a", "start": 1, "other": null, "spans": [1]}', names["Meta"])
    threads = [threading.Thread(target=meet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_two_threads_may_meet_a_struct_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", sorted(PACKAGES.glob("*/warmline_*/*.py")), ids=lambda path: path.name)
def test_nobody_decodes_otherwise(path: Path) -> None:
    """But with decoders that were made while the module was imported."""
    tree = ast.parse(path.read_text())
    within = [
        call for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        for call in ast.walk(each) if isinstance(call, ast.Call)
    ]  # fmt: skip
    typed = [call.lineno for call in within if is_typed_decoding(call)]
    assert not typed or path.name == DECODE, f"lines {typed}: use warmline_wire.messages.decode"


def is_typed_decoding(call: ast.Call) -> bool:
    """As msgspec.json.decode(data, type=Meta), msgspec.msgpack.Decoder(Meta) or msgspec.convert(value, Meta)."""
    name = ast.unparse(call.func)
    if not name.startswith("msgspec."):
        return False
    return name.endswith((".Decoder", ".convert")) or (name.endswith(".decode") and bool(call.keywords))
