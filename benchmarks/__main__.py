"""Run the benchmarks that need no GPU, one after the other, and write what they print to one summary.

Each writes RESULTS/NAME.json, with every value measured, and prints one table, which goes to RESULTS/summary.md, too.
The summary begins with the machine and the versions, and ends with how far the pairs' estimates of the time to the
first token were off.  A benchmark that fails does not stop the others; the exit code is then 1.

Usage: .venv/bin/python benchmarks [--only herd,restart] [--quick]
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from common.perf_lines import format_estimates, read_samples
from common.results import write_json
from common.servers import format_blas

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "bench"
BENCHMARK_TIMEOUT_S = 3600.0
# Scripts and folders in the order in which they run, with the flags that they have here.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "serving/cold.py": (),
    "serving/restart.py": (),
    "serving/restore.py": (),
    "serving/concurrency.py": (),
    "serving/herd.py": (),
    "serving/agent.py": (),
    "serving/beside.py": (),
    "models/swap.py": (),
    "serving/overhead.py": ("--requests", "128"),
    "serving/growth.py": ("--residents", "10", "500", "2000"),
    "rendering": (),
    "compression": (),
    "segments.py": ("--tiny",),
}
# Thousands of small requests, which would outweigh all others in the error of the estimates.
SMALL_REQUESTS = ("overhead", "growth")
VERSIONS = ("mlx", "mlx-lm", "warmline")


def get_name(script: str) -> str:
    return Path(script).stem


def run_benchmark(script: str, flags: Sequence[str], results: Path) -> tuple[int, str]:
    """Run one in a process of its own; (exit code, printed text), the text is shown as it comes."""
    name = get_name(script)
    command = [sys.executable, str(ROOT / "benchmarks" / script), *flags, "--json", str(results / f"{name}.json")]
    logs = results / "logs" / name
    for log in logs.glob("*.log"):  # of an earlier run
        log.unlink()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "benchmarks"),
        "PYTHONUNBUFFERED": "1",
        "BENCHMARK_LOGS": str(logs),
    }
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        # As Ctrl-C does, so that it ends the servers that it started.
        timer = threading.Timer(BENCHMARK_TIMEOUT_S, process.send_signal, [signal.SIGINT])
        timer.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
        timer.cancel()
    return process.returncode, "".join(printed)


def describe_machine() -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in VERSIONS)
    load = f"load {os.getloadavg()[0]:.1f} at the start"
    return f"{platform.platform()}, {os.cpu_count()} cores, {load}; Python {platform.python_version()}, {versions}."


def describe_commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def format_section(name: str, code: int, seconds: float, text: str) -> str:
    """A table that is no markdown is shown as it was printed."""
    shown = text.strip() if "\n|" in f"\n{text}" else f"```text\n{text.rstrip()}\n```"
    failed = f" It **failed** with exit code {code}." if code else ""
    return f"## {name}\n\n{shown}\n\n{seconds:.0f} s.{failed}\n"


def run(scripts: Sequence[str], is_quick: bool, results: Path) -> int:
    results.mkdir(parents=True, exist_ok=True)
    sections = [f"# Benchmarks\n\nCommit {describe_commit()}. {describe_machine()} {format_blas()}.\n"]
    codes: dict[str, int] = {}
    for script in scripts:
        name, began = get_name(script), time.monotonic()
        print(f"\n## {name}\n", flush=True)
        codes[name], text = run_benchmark(script, [*BENCHMARKS[script], *(["--quick"] if is_quick else [])], results)
        sections.append(format_section(name, codes[name], time.monotonic() - began, text))
        (results / "summary.md").write_text("\n".join(sections), encoding="utf-8")
    names = [name for name in codes if name not in SMALL_REQUESTS]
    samples = list(read_samples(log for name in names for log in sorted((results / "logs" / name).glob("*.log"))))
    write_json(results / "estimates.json", [{**vars(sample), "error": sample.error} for sample in samples])
    estimates = f"## Estimates of the time to the first token\n\n{format_estimates(samples)}\n"
    print(f"\n{estimates}")
    (results / "summary.md").write_text("\n".join([*sections, estimates]), encoding="utf-8")
    failed = [name for name, code in codes.items() if code]
    print(f"{results / 'summary.md'}{'; failed: ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {get_name(script): script for script in BENCHMARKS}
    parser.add_argument("--only", metavar="NAMES", help=f"some, separated by commas: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="small and once: whether they work, not how fast")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="default: build/bench")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(names)
    if unknown := sorted({*wanted} - {*names}):
        parser.error(f"no benchmark is named {', '.join(unknown)}; there are {', '.join(names)}")
    return run([names[name] for name in names if name in wanted], options.quick, options.results.resolve())


if __name__ == "__main__":
    sys.exit(main())
