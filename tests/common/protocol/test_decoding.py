"""Decoders of messages are built before threads use them.

msgspec 0.22 ends the process (SIGSEGV) where two threads decode into a struct that neither has met: restores after a
start did, which read the headers of their files beside each other.
"""

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from warmline_common.protocol.messages import ErrorBody, decode

PACKAGES = Path(__file__).parents[3]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DECODE = "messages.py"  # whose `decode` sees to it

RACE = """
import sys, threading
from typing import Literal
import msgspec
from warmline_common.protocol.messages import decode

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


def test_threads_decode_new_struct_concurrently() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_typed_decoding_goes_through_guarded_functions() -> None:
    """But with decoders that were made while the module was imported."""
    paths = [path for path in PACKAGES.glob("*/warmline_*/**/*.py") if path.name != DECODE]
    assert len(paths) > 250
    typed = [f"{path.name}:{line}" for path in paths for line in find_typed_decoding(path)]
    assert not typed, "use warmline_common.protocol.messages.decode"


@pytest.mark.parametrize("data", [b'{"message": "\xff"}', b'{"x": ' + b"[" * 100_000])
def test_malformed_json_raises_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data, ErrorBody)


def find_typed_decoding(path: Path) -> list[int]:
    """Find calls within functions that decode into a type."""
    functions = (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, FUNCTIONS))
    calls = (each for function in functions for each in ast.walk(function) if isinstance(each, ast.Call))
    return [call.lineno for call in calls if is_typed_decoding(call)]


def is_typed_decoding(call: ast.Call) -> bool:
    """True for msgspec.json.decode(data, type=Meta), msgspec.msgpack.Decoder(Meta), msgspec.convert(value, Meta)."""
    name = ast.unparse(call.func)
    if not name.startswith("msgspec."):
        return False
    return name.endswith((".Decoder", ".convert")) or (name.endswith(".decode") and bool(call.keywords))
