"""Fake launchctl: records its calls, and runs jobs as launchd does, without restarting failed ones.

Put on PATH by `fake_managers.FakeUser`.  The folder FAKE_MANAGER has `calls` (a JSON list a line) and a file for each
loaded job.  FAKE_MANAGER_THEN says what a job becomes that is started: "run" (the real program, with nothing in its
environment but what the plist says), "pid N" or "exit N" (nothing is run, and print tells this).
"""

import json
import os
import plistlib
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_MANAGER"])
NOT_FOUND, BUSY, NO_PROCESS = 113, 5, 3
ENDING_S = 60


def find_job_file(target: str) -> Path:
    return FOLDER / f"{target.rpartition('/')[2]}.job"


def read_job(file: Path) -> dict[str, object]:
    return dict(json.loads(file.read_text()))


def write_job(file: Path, job: dict[str, object]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(job))
    draft.replace(file)


def is_running(job: dict[str, object]) -> bool:
    return job.get("pid") is not None


def start_job(file: Path, job: dict[str, object]) -> None:
    kind, _, number = os.environ.get("FAKE_MANAGER_THEN", "run").partition(" ")
    if kind == "pid":
        write_job(file, {**job, "pid": int(number)})
    elif kind == "exit":
        write_job(file, {**job, "pid": None, "exit": int(number)})
    else:
        subprocess.Popen(
            [sys.executable, "-IS", __file__, "keep", str(file)],
            start_new_session=True,
            stdout=subprocess.DEVNULL,  # who waits for our output does not wait for the job
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + ENDING_S
        while read_job(file).get("runs") == job.get("runs") and time.monotonic() < until:
            time.sleep(0.01)


def supervise_job(file: Path) -> None:
    """Run as the job's parent, in a process of its own."""
    job = read_job(file)
    plist = plistlib.loads(Path(str(job["path"])).read_bytes())
    with Path(plist["StandardErrorPath"]).open("ab") as output:
        process = subprocess.Popen(
            plist["ProgramArguments"],
            env=plist["EnvironmentVariables"],
            cwd=plist["WorkingDirectory"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            umask=plist["Umask"],
        )
    write_job(file, {**job, "pid": process.pid, "runs": int(str(job.get("runs", 0))) + 1})
    code = process.wait()
    if file.exists():
        write_job(file, {**read_job(file), "pid": None, "exit": code})


def end_job(file: Path, number: int) -> None:
    job = read_job(file)
    if "runs" not in job:
        write_job(file, {**job, "pid": None, "exit": 0})
    elif is_running(job):
        os.kill(int(str(job["pid"])), number)


def main(verb: str, *words: str) -> int:
    with (FOLDER / "calls").open("a") as calls:
        calls.write(json.dumps([verb, *words]) + "\n")
    file = find_job_file(words[-1].removesuffix(".plist"))
    if verb == "bootstrap":
        if file.exists():
            sys.stderr.write("Bootstrap failed: 5: Input/output error\n")
            return BUSY
        write_job(file, {"path": words[1]})
        start_job(file, read_job(file))
    elif verb != "enable" and not file.exists():
        sys.stderr.write(f'Could not find service "{file.stem}" in domain for user gui\n')
        return NOT_FOUND if verb == "print" else NO_PROCESS
    elif verb == "print":
        job = read_job(file)
        sys.stdout.write(f"{words[0]} = {{\n\tstate = {'running' if is_running(job) else 'not running'}\n")
        sys.stdout.write("\tspawn = {\n\t\tpid = 1\n\t}\n")
        sys.stdout.write(f"\tpid = {job['pid']}\n" if is_running(job) else "")
        sys.stdout.write(f"\tlast exit code = {job.get('exit', '(never exited)')}\n}}\n")
    elif verb == "kill":
        end_job(file, signal.Signals[words[0]])
    elif verb == "kickstart":
        if "-k" in words:
            end_job(file, signal.SIGKILL)
        start_job(file, read_job(file))
    elif verb == "bootout":
        end_job(file, signal.SIGTERM)
        until = time.monotonic() + ENDING_S
        while "runs" in read_job(file) and is_running(read_job(file)) and time.monotonic() < until:
            time.sleep(0.01)
        file.unlink()
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        supervise_job(Path(sys.argv[2]))
    else:
        sys.exit(main(*sys.argv[1:]))
