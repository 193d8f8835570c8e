"""Tokenization of one large text in a process of its own, which can be ended.  Any thread.

A call to a tokenizer can't be interrupted, and takes up to seconds a megabyte.  The process runs this file alone, with
nothing of the project, to start soon.

    stdin     a line of JSON (`_Header`), the tokenizer's JSON, the text
    stdout    u32le: the tokens' ids, then the ends of their characters
"""

import json
import subprocess
import sys
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import TypedDict

from tokenizers import Tokenizer

KillOnCancel = Callable[["subprocess.Popen[bytes]"], AbstractContextManager[None]]


class TokenizerProcessError(Exception):
    """The process has failed, or was killed by somebody else."""


class _Header(TypedDict):
    tokenizer_bytes: int
    encode_special_tokens: bool  # no part of the tokenizer's JSON
    add_special_tokens: bool


def tokenize_in_process(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, kill_on_cancel: KillOnCancel
) -> tuple["array[int]", "array[int]"]:
    """Ids as of `tokenizer.encode`, and for each the end of the characters up to there.

    `kill_on_cancel` may kill the process within its context, and raises there what says so.  Raises
    TokenizerProcessError.
    """
    encoded = tokenizer.to_str().encode()
    header = _Header(
        tokenizer_bytes=len(encoded),
        encode_special_tokens=tokenizer.encode_special_tokens,
        add_special_tokens=add_special_tokens,
    )
    request = b"".join((json.dumps(header).encode(), b"\n", encoded, text.encode()))
    command = [sys.executable, "-I", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process, kill_on_cancel(process):
        reply, _ = process.communicate(request)
    if process.returncode:
        raise TokenizerProcessError(f"exit code {process.returncode}")
    numbers = array("I", reply)
    count = len(numbers) // 2
    return numbers[:count], array("I", accumulate(numbers[count:], max))


def _main() -> None:
    source = sys.stdin.buffer
    header: _Header = json.loads(source.readline())
    tokenizer = Tokenizer.from_str(source.read(header["tokenizer_bytes"]).decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = header["encode_special_tokens"]
    encoding = tokenizer.encode(source.read().decode(), add_special_tokens=header["add_special_tokens"])
    sys.stdout.buffer.write(array("I", encoding.ids).tobytes())
    sys.stdout.buffer.write(array("I", (end for _, end in encoding.offsets)).tobytes())


if __name__ == "__main__":
    _main()
