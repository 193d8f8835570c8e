"""The gate that interrupts others: the backend ends in mid-conversation, comes again, and the conversation goes on."""

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from warmline_run.smoke.check import Failed, NotRun, Visit
from warmline_run.smoke.checks.basic import WITH_LOGPROBS
from warmline_run.smoke.checks.long_transcript import Turn, against_cold
from warmline_run.smoke.sizing import long_bytes, measure
from warmline_run.smoke.transcript import Transcript

POLL_S = 0.1
PS_TIMEOUT_S = 10.0
TALK_SHARE = 3  # of the cancelled prompt: a third as long


async def restart(visit: Visit) -> str:
    if not visit.may_restart:
        raise NotRun("ends the backend, which interrupts others: add --restart")
    secret = await _secret(visit)
    script = Transcript(f"{visit.seed} restart", long_bytes(visit, await measure(visit)) // TALK_SHARE)
    fields: dict[str, Any] = {"max_tokens": visit.scale.answer_tokens, **WITH_LOGPROBS}
    messages = [{"role": "user", "content": script.said(1)}]
    before = await visit.server.ask(messages, **fields)
    await _settled(visit, secret)
    seconds = await _ended_and_back(visit)
    messages += [
        {"role": "assistant", "content": before.text},
        {"role": "user", "content": "And what would you do next?"},
    ]
    after = await visit.server.ask(messages, **fields)
    cached, wanted = after.cached_tokens or 0, visit.kept(before.prompt_tokens, before.prompt_tokens // 10)
    if cached < wanted:
        raise Failed(
            f"after the restart {cached} tokens were reused of the {before.prompt_tokens} computed before",
            "is saving off, or failing? `curl .../health` says, and so does the log",
        )
    await against_cold(visit, Turn(2, messages, after))
    return (
        f"back after {seconds:.1f} s; {cached} of {after.prompt_tokens} tokens restored, and the answer is the cold one"
    )


async def _secret(visit: Visit) -> str:
    """The home's, if this very server runs from it: only that takes the home's secret.  Raises NotRun."""
    if visit.home is None:
        raise NotRun("only a server on this machine can be restarted")
    try:
        secret = (visit.home / "secret").read_text().strip()
    except OSError as error:
        raise NotRun(
            f"{visit.home / 'secret'} can't be read ({error.strerror}): name the server's home with --home"
        ) from None
    status, _ = await visit.server.get("//warmline/status", secret)
    if status != 200:
        raise NotRun(f"this server does not run from {visit.home}: name its home with --home")
    return secret


async def _settled(visit: Visit, secret: str) -> None:
    """Wait until what was answered is on disk."""
    limit_s = asyncio.get_running_loop().time() + visit.server.timeout_s
    while asyncio.get_running_loop().time() < limit_s:
        _, status = await visit.server.get("//warmline/status", secret)
        if isinstance(status, dict) and not status.get("settling"):
            return
        await asyncio.sleep(POLL_S)
    raise Failed(f"what was answered is not on disk within {visit.server.timeout_s:g} s", "the log says why")


async def _ended_and_back(visit: Visit) -> float:
    """SIGTERM to the backend; returns how long it took until another one was ready.  Raises NotRun, Failed."""
    assert visit.home is not None
    file = visit.home / "run" / "backend.pid"
    pid = _backend(file)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    os.kill(pid, signal.SIGTERM)
    while loop.time() - began_s < visit.server.timeout_s:
        await asyncio.sleep(POLL_S)
        if _pid_in(file) not in (pid, None) and (await visit.server.get("//ready"))[0] == 200:
            return loop.time() - began_s
    raise Failed(
        f"the backend (pid {pid}) was told to end, and no other was ready within {visit.server.timeout_s:g} s",
        "`warmline serve`, or launchd, starts it again; one that was started by hand stays down",
    )


def _backend(file: Path) -> int:
    """The pid, if that process still is a backend.  Raises NotRun."""
    pid = _pid_in(file)
    if pid is None:
        raise NotRun(f"{file} names no process")
    if "warmline_backend" not in _command_line(pid):
        raise NotRun(f"{file} names process {pid}, which is no backend of Warmline")
    return pid


def _command_line(pid: int) -> str:
    """ "" where it can't be known."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")  # no process needed, where there is such a file
    with suppress(OSError, subprocess.SubprocessError):
        words = ["ps", "-p", str(pid), "-o", "command="]
        return subprocess.run(words, capture_output=True, text=True, timeout=PS_TIMEOUT_S, check=False).stdout
    return ""


def _pid_in(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
