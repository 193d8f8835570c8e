"""Log lines and JSON objects, rotated files, and a disk that refuses them."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from warmline_common.logging import (
    TEXT_FORMAT,
    JsonFormatter,
    LogFileHandler,
    TextFormatter,
    describe_error,
    format_rfc3339,
    format_traceback,
    request_context,
    set_request_id,
)

SECRET = "once upon a time"


@pytest.fixture
def captured_logs() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.Logger("warmline_test")
    yield logger
    for handler in logger.handlers:
        handler.close()


def add_handler(log: logging.Logger, handler: logging.Handler, formatter: logging.Formatter) -> logging.Handler:
    handler.setFormatter(formatter)
    log.addHandler(handler)
    return handler


# ---- formats


def test_line_names_request_once(log: logging.Logger, captured_logs: io.StringIO) -> None:
    add_handler(log, logging.StreamHandler(captured_logs), TextFormatter("%(levelname)s %(name)s: %(message)s"))
    log.info("nobody's")
    with request_context("r-1"):
        log.info("somebody's")
        log.info("request r-1 is named")
        set_request_id("r-2")
        log.warning("another's")
    log.info("nobody's again")
    assert captured_logs.getvalue().splitlines() == [
        "INFO warmline_test: nobody's",
        "INFO warmline_test: somebody's (request r-1)",
        "INFO warmline_test: request r-1 is named",
        "WARNING warmline_test: another's (request r-2)",
        "INFO warmline_test: nobody's again",
    ]


def test_text_cannot_forge_log_lines(log: logging.Logger, captured_logs: io.StringIO) -> None:
    add_handler(log, logging.StreamHandler(captured_logs), TextFormatter("%(levelname)s %(message)s"))
    log.info("called %s", "x\nERROR all is lost \x1b[2K\r\u202eend\u2028")
    log.error("fails", exc_info=RuntimeError("\x1b[2J"))
    assert captured_logs.getvalue().splitlines() == [
        "INFO called x",
        r"    ERROR all is lost \x1b[2K\r\u202eend\u2028",
        "ERROR fails",
        "Traceback (most recent call last):",
        r"RuntimeError: \x1b[2J",
    ]


def test_json_log_is_one_object_per_line(log: logging.Logger, captured_logs: io.StringIO) -> None:
    add_handler(log, logging.StreamHandler(captured_logs), JsonFormatter("proxy"))
    with request_context("r-1"):
        log.info('two\nlines and a "quote"')
    log.info("PERF ...", extra={"fields": {"event": "perf", "request": "r-2", "queue_s": 0.5}})
    first, second = map(json.loads, captured_logs.getvalue().splitlines())
    assert first.pop("time").endswith("Z") and second.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "process": "proxy",
        "logger": "warmline_test",
        "request": "r-1",
        "message": 'two\nlines and a "quote"',
    }
    common_fields = {"level": "info", "process": "proxy", "logger": "warmline_test"}
    assert second == {**common_fields, "event": "perf", "request": "r-2", "queue_s": 0.5}


def test_times_are_utc_to_the_millisecond() -> None:
    assert (
        format_rfc3339(0.0) == "1970-01-01T00:00:00.000Z"
        and format_rfc3339(1764344614.0126) == "2025-11-28T15:43:34.012Z"
    )


# ---- exceptions


class ForeignError(Exception):
    """Exception of another library, with a traceback of its own."""


def make_raised_error(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:  # noqa: BLE001  it is what was asked for
        return caught


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ForeignError(SECRET), "ForeignError"),
        (KeyError(SECRET), "KeyError"),
        (ValueError(SECRET), "ValueError"),
        (ValueError("[reshape] Cannot reshape array of size 2"), "[reshape] Cannot reshape array of size 2"),
        (RuntimeError(f"failed at '{SECRET}'"), "failed at '…'"),
        (OSError(28, "No space left on device", "/home/x"), "[Errno 28] No space left on device: '/home/x'"),
    ],
)
def test_exception_text_is_redacted(error: Exception, text: str) -> None:
    assert describe_error(error) == text


def test_traceback_has_frames_and_types_of_all_causes() -> None:
    inner = make_raised_error(KeyError(SECRET))
    text = format_traceback(make_raised_error(ForeignError(SECRET), inner))
    assert SECRET not in text and text.index("KeyError\n") < text.index("direct cause") < text.index("ForeignError")
    assert text.count("in make_raised_error") == 2


def test_formatters_write_redacted_tracebacks(log: logging.Logger, captured_logs: io.StringIO) -> None:
    add_handler(log, logging.StreamHandler(captured_logs), TextFormatter(TEXT_FORMAT))
    add_handler(log, logging.StreamHandler(captured_logs), JsonFormatter("backend"))
    log.error("it failed", exc_info=make_raised_error(ForeignError(SECRET)))
    text = captured_logs.getvalue()
    assert SECRET not in text and "ForeignError\n{" in text
    assert json.loads(text[text.index("{") :])["traceback"].endswith("ForeignError")


# ---- files


def write_until_rotated(log: logging.Logger, path: Path, otherwise: io.StringIO, **limits: int) -> logging.Handler:
    last = logging.StreamHandler(otherwise)
    last.setFormatter(logging.Formatter("%(message)s"))
    return add_handler(log, LogFileHandler(path, last, **limits), logging.Formatter("%(message)s"))


def test_files_are_rotated_and_private(log: logging.Logger, captured_logs: io.StringIO, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "proxy.log"
    write_until_rotated(log, path, captured_logs, bytes_max=100, backup_count=2)
    for number in range(20):
        log.info("line %02d %s", number, "-" * 32)
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == ["proxy.log", "proxy.log.1", "proxy.log.2"]
    files = [path.with_name(name) for name in reversed(names)]
    assert "".join(file.read_text() for file in files).splitlines()[-1].startswith("line 19 ")
    assert all(file.stat().st_size <= 100 and file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert not captured_logs.getvalue()


def test_unwritable_log_folder_loses_no_line_and_warns_once(
    log: logging.Logger, captured_logs: io.StringIO, tmp_path: Path
) -> None:
    (tmp_path / "logs").write_text("a file")
    write_until_rotated(log, tmp_path / "logs" / "proxy.log", captured_logs)
    log.info("first")
    log.info("second")
    complaint, *lines = captured_logs.getvalue().splitlines()
    assert "can't be written to" in complaint and lines == ["first", "second"]
    (tmp_path / "logs").unlink()
    log.info("third")
    assert (tmp_path / "logs" / "proxy.log").read_text() == "third\n"


def test_fifo_in_place_of_log_delays_nothing(log: logging.Logger, captured_logs: io.StringIO, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "proxy.log")
    write_until_rotated(log, tmp_path / "proxy.log", captured_logs)
    log.info("first")
    complaint, line = captured_logs.getvalue().splitlines()
    assert "can't be written to" in complaint and line == "first"


def test_full_disk_loses_no_log_line(log: logging.Logger, captured_logs: io.StringIO, tmp_path: Path) -> None:
    path = tmp_path / "proxy.log"
    path.symlink_to("/dev/full")
    if not path.exists():
        pytest.skip("there is no /dev/full")
    write_until_rotated(log, path, captured_logs)
    log.info("first")
    log.info("second")
    complaint, *lines = captured_logs.getvalue().splitlines()
    assert "No space left" in complaint and lines == ["first", "second"]


# ---- whole processes

START = """
import sys, threading
from pathlib import Path
from warmline_common.storage.home import Home
from warmline_common.process.console import write_line
from warmline_common.logging import start_logging
start_logging("proxy", "info", sys.argv[2], sys.argv[3] == "files", Home(Path(sys.argv[1])))
"""


def run_script(home: Path, script: str, format: str = "text", files: str = "files") -> Any:
    return subprocess.run(
        [sys.executable, "-c", START + script, str(home), format, files], capture_output=True, text=True, check=False
    )


def test_fatal_error_is_on_stderr_and_in_file(tmp_path: Path) -> None:
    script = """
write_line("proxy: the last words")
thread = threading.Thread(target=lambda: {}["once upon"], name="worker")
thread.start()
thread.join()
raise ValueError("a time")
"""
    done = run_script(tmp_path, script)
    logged = (tmp_path / "logs" / "proxy.log").read_text()
    for text in (done.stderr, logged):
        assert "proxy: the last words" in text
        assert "worker ends" in text and text.rstrip().endswith("ValueError")
        assert "once upon" not in text.replace('{}["once upon"]', "") and ": a time" not in text
    assert done.returncode == 1


def test_json_on_stderr_is_json_in_all_lines(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'write_line("the last words")\nraise ValueError("a time")', "json", "no files")
    record, failure = map(json.loads, done.stderr.splitlines())
    assert record["message"] == "the last words" and failure["traceback"].endswith("ValueError")
    assert not (tmp_path / "logs").exists()


def test_native_fault_is_logged_by_next_start(tmp_path: Path) -> None:
    run_script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert "Segmentation fault" in (tmp_path / "logs" / "proxy.fault").read_text()
    result = run_script(tmp_path, "")
    assert "Segmentation fault" in result.stderr
    assert "ended by a fault" in (tmp_path / "logs" / "proxy.log").read_text()
    assert not run_script(tmp_path, "").stderr and (tmp_path / "logs" / "proxy.fault").stat().st_mode & 0o777 == 0o600
