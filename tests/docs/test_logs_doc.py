"""docs/logs.md lists exactly the keys of JSON logs and the fields of PERF lines, with filters that work."""

import json
import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from warmline_common import logging as logs
from warmline_common.logging import JsonFormatter, request_context
from warmline_proxy.request_log import build_perf_fields, format_perf_line
from warmline_proxy.store.rows import RequestRecord

DOCUMENT = (Path(__file__).parents[2] / "docs" / "logs.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\| .*\|$", DOCUMENT, re.MULTILINE)
FILTERS = re.findall(r"^```jq\n(.+)\n```$", DOCUMENT, re.MULTILINE)
SLOW = RequestRecord(
    id="ID",
    at=0.5,
    endpoint="chat",
    client_model="m",
    outcome="error",
    source="cold",
    why_not_warmer="nothing stored",
    prefilled_tokens=2000,
    ttft_s=3.25,
    error="504: too late",
    guard="a run of 256 digits",
    dispatches=2,
    waits={"memory": 1.5},
)


def make_line(level: int, message: str, **options: Any) -> str:
    record = logging.LogRecord("warmline_proxy", level, __file__, 1, message, (), options.pop("exc_info", None))
    record.__dict__.update(options)
    return JsonFormatter("proxy").format(record)


def make_lines() -> list[str]:
    """Make a log with a line of each kind."""
    try:
        raise RuntimeError("planted")
    except RuntimeError as error:
        failed = (type(error), error, error.__traceback__)
    with request_context("ID"):
        named = make_line(logging.INFO, "it is planned")
    perf = make_line(logging.INFO, "PERF", fields=build_perf_fields(SLOW, "a talk"))
    return [make_line(logging.INFO, "listening"), named, perf, make_line(logging.ERROR, "it failed", exc_info=failed)]


def test_logs_doc_has_all_json_keys() -> None:
    keys = {key for each in make_lines() for key in json.loads(each)}
    assert sorted(key for key, _ in ROWS) == sorted(keys)


def test_logs_doc_has_all_perf_fields() -> None:
    fields = re.findall(r" (\w+)=", format_perf_line(SLOW, "a talk"))
    assert sorted(filter(None, (text for _, text in ROWS))) == sorted(fields)


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(
    ("number", "found"),
    [
        (0, ["3.25\tcold\t0\tnothing stored"]),
        (1, ["info\tit is planned", "info\tperf"]),
        (2, ["ID 2000 nothing stored"]),
    ],
)
def test_logs_doc_filters_match(number: int, found: list[str], tmp_path: Path) -> None:
    shown = run_jq(FILTERS[number], tmp_path, *(["-s"] if number == 0 else []))
    assert [text.removeprefix(text[:25]) if text[10:11] == "T" else text for text in shown] == found


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_logs_doc_last_filter_shows_tracebacks(tmp_path: Path) -> None:
    first, *rest = run_jq(FILTERS[3], tmp_path)
    assert first.endswith(" it failed") and rest[0].startswith("Traceback") and rest[-1] == "RuntimeError: planted"


def run_jq(words: str, folder: Path, *flags: str) -> list[str]:
    log = folder / "proxy.log"
    log.write_text("\n".join(make_lines()) + "\n")
    done = subprocess.run(["jq", "-r", *flags, words, str(log)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_logs_doc_sizes_are_right() -> None:
    size, kept = logs.FILE_BYTES_MAX, logs.BACKUP_COUNT
    assert f"{size // 10**6} MB becomes" in DOCUMENT and f"to `.{kept}`" in DOCUMENT
    assert f"{2 * (kept + 1) * size // 10**6} MB at most" in DOCUMENT.replace("\n", " ")
