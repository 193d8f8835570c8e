"""Check of a restart: the backend ends in mid-conversation, starts again, and the conversation goes on."""

import asyncio
import os
import signal
import time

from warmline_common.process.pids import read_command_line
from warmline_common.storage.file_lock import read_pid
from warmline_common.storage.home import Home
from warmline_run.smoke.check import CheckFailedError, CheckNotRunError, Target
from warmline_run.smoke.checks.basic import WITH_LOGPROBS
from warmline_run.smoke.checks.long_transcript import TranscriptTurn, compare_with_cold
from warmline_run.smoke.responses import Message
from warmline_run.smoke.transcript import compute_long_bytes, measure_text, render_turn

POLL_S = 0.1
LONG_TOKENS_DIVISOR = 3  # of the cancelled prompt: a third as long


async def check_restart(target: Target) -> str:
    if not target.may_restart:
        raise CheckNotRunError("ends the backend, which interrupts others: add --restart")
    secret = await _read_secret(target)
    prompt_bytes = compute_long_bytes(target, await measure_text(target)) // LONG_TOKENS_DIVISOR
    messages: list[Message] = [{"role": "user", "content": render_turn(f"{target.seed} restart", 1, prompt_bytes)}]
    before = await target.complete(messages, **WITH_LOGPROBS)
    target.require_step(before.prompt_tokens, slack=before.prompt_tokens // 10)
    await _wait_until_saved(target, secret)
    seconds = await _restart_backend(target)
    messages += [
        {"role": "assistant", "content": before.text},
        {"role": "user", "content": "And what would you do next?"},
    ]
    after = await target.complete(messages, **WITH_LOGPROBS)
    cached = after.cached_tokens or 0
    if cached < target.expected_cached_tokens(before.prompt_tokens, slack=before.prompt_tokens // 10):
        raise CheckFailedError(
            f"after the restart {cached} tokens were reused of the {before.prompt_tokens} computed before",
            "is saving off, or failing? `curl .../health` says, and so does the log",
        )
    await compare_with_cold(target, TranscriptTurn(2, messages, after))
    return (
        f"back after {seconds:.1f} s; {cached} of {after.prompt_tokens} tokens restored, and the answer is the cold one"
    )


async def _read_secret(target: Target) -> str:
    """Secret of the server's home; no other server takes it.  Raises CheckNotRunError."""
    if target.home is None:
        raise CheckNotRunError("only a server on this machine can be restarted")
    try:
        secret = Home(target.home).read_secret()
    except OSError as error:
        raise CheckNotRunError(
            f"{target.home / 'secret'} can't be read ({error.strerror or error}): name the server's home with --home"
        ) from None
    status, _ = await target.client.get("//warmline/status", secret)
    if status != 200:
        raise CheckNotRunError(f"this server does not run from {target.home}: name its home with --home")
    return secret


async def _wait_until_saved(target: Target, secret: str) -> None:
    """Wait until the answered conversation is on disk."""
    until = time.monotonic() + target.client.timeout_s
    while time.monotonic() < until:
        _, status = await target.client.get("//warmline/status", secret)
        if isinstance(status, dict) and not status.get("settling"):
            return
        await asyncio.sleep(POLL_S)
    raise CheckFailedError(f"the answer's KV is not on disk within {target.client.timeout_s:g} s", "the log says why")


async def _restart_backend(target: Target) -> float:
    """Send SIGTERM to the backend; returns the seconds until another one is ready.

    Raises CheckNotRunError or CheckFailedError.
    """
    assert target.home is not None
    file = target.home / "run" / "backend.pid"
    pid = read_pid(file)
    if pid is None:
        raise CheckNotRunError(f"{file} names no process")
    if "warmline_backend" not in read_command_line(pid):
        raise CheckNotRunError(f"{file} names process {pid}, which is no backend of Warmline")
    began_s = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    while time.monotonic() - began_s < target.client.timeout_s:
        await asyncio.sleep(POLL_S)
        if read_pid(file) not in (pid, None) and (await target.client.get("//ready"))[0] == 200:
            return time.monotonic() - began_s
    raise CheckFailedError(
        f"the backend (pid {pid}) got SIGTERM, and no other was ready within {target.client.timeout_s:g} s",
        "`warmline serve`, or launchd, starts it again; one that was started by hand stays down",
    )
