"""Standby processes: started and imported ahead, they wait on standard input for an order.

The keeper starts one ahead of the next load, since starting Python and importing mlx takes seconds.  An order may be
held: the process then prepares all but the model, and waits for another line before it takes memory.
"""

import json
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

STANDBY_FLAG = "--standby"
RELEASE_LINE = b"go on\n"


class StandbyOrder(NamedTuple):
    """Command line of the process; `is_held`: a release follows."""

    arguments: list[str]
    is_held: bool = False


def encode_order(arguments: Sequence[str], *, is_held: bool = False) -> bytes:
    """Line that makes a standby process go on with these arguments."""
    return json.dumps([list(arguments), is_held]).encode() + b"\n"


def read_order(stream: BinaryIO) -> StandbyOrder | None:
    """Wait for an order; None where the stream ends without, since the process is not needed any more."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    arguments, is_held = json.loads(line)
    return StandbyOrder([str(word) for word in arguments], bool(is_held))


def wait_for_release(stream: BinaryIO) -> bool:
    """Wait for the release of a held order; False where the stream ends without."""
    return stream.readline() == RELEASE_LINE
