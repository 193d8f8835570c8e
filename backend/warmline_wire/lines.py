"""What a process says to people, besides what it logs."""

import sys


def say(line: str) -> None:
    """Write a line to stderr, at once and whole: under `warmline serve` several processes write there, and any may be
    killed at any moment.  print() writes a line's end by itself where output is unbuffered.
    """
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
