"""The gate that interrupts others: the backend ends in mid-conversation, comes again, and the conversation goes on."""

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from warmline_run.smoke.check import CheckFailedError, CheckNotRunError, Target
from warmline_run.smoke.checks.basic import WITH_LOGPROBS
from warmline_run.smoke.checks.long_transcript import TranscriptTurn, compare_with_cold
from warmline_run.smoke.transcript import Transcript, compute_long_bytes, measure_text

POLL_S = 0.1
PS_TIMEOUT_S = 10.0
LONG_TOKENS_DIVISOR = 3  # of the cancelled prompt: a third as long


async def check_restart(target: Target) -> str:
    if not target.may_restart:
        raise CheckNotRunError("ends the backend, which interrupts others: add --restart")
    secret = await _read_secret(target)
    script = Transcript(
        f"{target.seed} restart", compute_long_bytes(target, await measure_text(target)) // LONG_TOKENS_DIVISOR
    )
    fields: dict[str, Any] = {"max_tokens": target.scale.answer_tokens, **WITH_LOGPROBS}
    messages = [{"role": "user", "content": script.render_turn(1)}]
    before = await target.client.complete(messages, **fields)
    await _wait_until_saved(target, secret)
    seconds = await _restart_backend(target)
    messages += [
        {"role": "assistant", "content": before.text},
        {"role": "user", "content": "And what would you do next?"},
    ]
    after = await target.client.complete(messages, **fields)
    cached, wanted = (
        after.cached_tokens or 0,
        target.expected_cached_tokens(before.prompt_tokens, before.prompt_tokens // 10),
    )
    if cached < wanted:
        raise CheckFailedError(
            f"after the restart {cached} tokens were reused of the {before.prompt_tokens} computed before",
            "is saving off, or failing? `curl .../health` says, and so does the log",
        )
    await compare_with_cold(target, TranscriptTurn(2, messages, after))
    return (
        f"back after {seconds:.1f} s; {cached} of {after.prompt_tokens} tokens restored, and the answer is the cold one"
    )


async def _read_secret(target: Target) -> str:
    """The home's, if this very server runs from it: only that takes the home's secret.  Raises NotRun."""
    if target.home is None:
        raise CheckNotRunError("only a server on this machine can be restarted")
    try:
        secret = (target.home / "secret").read_text().strip()
    except OSError as error:
        raise CheckNotRunError(
            f"{target.home / 'secret'} can't be read ({error.strerror}): name the server's home with --home"
        ) from None
    status, _ = await target.client.get("//warmline/status", secret)
    if status != 200:
        raise CheckNotRunError(f"this server does not run from {target.home}: name its home with --home")
    return secret


async def _wait_until_saved(target: Target, secret: str) -> None:
    """Wait until what was answered is on disk."""
    limit_s = asyncio.get_running_loop().time() + target.client.timeout_s
    while asyncio.get_running_loop().time() < limit_s:
        _, status = await target.client.get("//warmline/status", secret)
        if isinstance(status, dict) and not status.get("settling"):
            return
        await asyncio.sleep(POLL_S)
    raise CheckFailedError(f"what was answered is not on disk within {target.client.timeout_s:g} s", "the log says why")


async def _restart_backend(target: Target) -> float:
    """SIGTERM to the backend; returns how long it took until another one was ready.  Raises NotRun, Failed."""
    assert target.home is not None
    file = target.home / "run" / "backend.pid"
    pid = _read_backend_pid(file)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    os.kill(pid, signal.SIGTERM)
    while loop.time() - began_s < target.client.timeout_s:
        await asyncio.sleep(POLL_S)
        if _read_pid(file) not in (pid, None) and (await target.client.get("//ready"))[0] == 200:
            return loop.time() - began_s
    raise CheckFailedError(
        f"the backend (pid {pid}) was told to end, and no other was ready within {target.client.timeout_s:g} s",
        "`warmline serve`, or launchd, starts it again; one that was started by hand stays down",
    )


def _read_backend_pid(file: Path) -> int:
    """The pid, if that process still is a backend.  Raises NotRun."""
    pid = _read_pid(file)
    if pid is None:
        raise CheckNotRunError(f"{file} names no process")
    if "warmline_backend" not in _read_command_line(pid):
        raise CheckNotRunError(f"{file} names process {pid}, which is no backend of Warmline")
    return pid


def _read_command_line(pid: int) -> str:
    """ "" where it can't be known."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")  # no process needed, where there is such a file
    with suppress(OSError, subprocess.SubprocessError):
        words = ["ps", "-p", str(pid), "-o", "command="]
        return subprocess.run(words, capture_output=True, text=True, timeout=PS_TIMEOUT_S, check=False).stdout
    return ""


def _read_pid(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
