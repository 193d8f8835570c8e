"""Log of a process: text or JSON lines, on stderr or in rotated files, each with the request that it is about.

No prompt, answer, header or key may get into a log.  Callers log an error's text without the client's values
(`redaction`); texts of other libraries' exceptions are redacted here, since they quote their input.
"""

import asyncio
import faulthandler
import io
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any

from warmline_common.process import console
from warmline_common.process.redaction import MESSAGE_CHARS_MAX, escape_unprintable, redact
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.regular_file import open_regular

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FILE_BYTES_MAX = 10_000_000
BACKUP_COUNT = 5  # older files, besides the current one
# Other loggers' lines count from "warning" on.
OWN_PACKAGES = ("warmline_proxy", "warmline_backend", "warmline_common", "warmline_run")
FAULT_BYTES_MAX = 64 * 1024
CAUSES_MAX = 8  # of an exception, that are logged
# Plain words about their own state, but for what they quote.  Other texts may quote a request.
_SAFE_ERRORS = (RuntimeError, MemoryError, TypeError, AssertionError, ArithmeticError, ImportError)
_UNSAFE_PACKAGES = ("jinja2", "msgspec", "tokenizers", "llguidance", "transformers")

log = logging.getLogger(__name__)

_request_id: ContextVar[str] = ContextVar("request", default="")


# ---- the request of a line


def current_request_id() -> str:
    """Id of the request that this task works for; "" for none."""
    return _request_id.get()


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Context in which log lines, and those of tasks begun in it, carry this request's id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def set_request_id(request_id: str) -> None:
    """Set the request's id for log lines until the task, or the enclosing `request_context`, ends."""
    _request_id.set(request_id)


# ---- start


def start_logging(process: str, level: str, format: str, files: bool, home: Home) -> None:
    """Set up logging, once, at a process's start; a second call does nothing.

    `process` is "proxy", "keeper", "backend" or "backend-" and an instance's name, `level` any case, `format` "text" or
    "json"; with `files` the log is HOME/logs/{process}.log, and only the error that ends the process is on stderr, too.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    formatter = JsonFormatter(process) if format == "json" else TextFormatter(TEXT_FORMAT)
    on_stderr, critical_on_stderr = logging.StreamHandler(sys.stderr), logging.StreamHandler(sys.stderr)
    critical_on_stderr.setLevel(logging.CRITICAL)
    in_file = LogFileHandler(home.logs / f"{process}.log", fallback=on_stderr)
    for handler in (on_stderr, critical_on_stderr, in_file):
        handler.setFormatter(formatter)
    for handler in (in_file, critical_on_stderr) if files else (on_stderr,):
        root.addHandler(handler)
    _set_levels(level.upper())
    logging.raiseExceptions = False  # else a failed line is printed with all its arguments
    if files or format == "json":
        console.copy_to_log(log.error, log_only=not files)
    _install_exception_hooks()
    _enable_fault_handler(home.logs / f"{process}.fault" if files else None)


def _set_levels(level: str) -> None:
    """Silence libraries that log each byte they move."""
    logging.getLogger().setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
    for name in OWN_PACKAGES:
        logging.getLogger(name).setLevel(level)


# ---- formats


class _Formatter(logging.Formatter):
    def formatException(self, ei: Any) -> str:
        return format_traceback(ei[1]) if ei[1] is not None else ""


def _find_request_id(record: logging.LogRecord) -> str:
    return getattr(record, "request", "") or current_request_id()


class TextFormatter(_Formatter):
    """Formatter of text lines.  A line that does not name its request ends with its id."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = escape_unprintable(super().formatMessage(record), line_end="\n    ")
        request_id = _find_request_id(record)
        return line if not request_id or request_id in record.message else f"{line} (request {request_id})"


class JsonFormatter(_Formatter):
    """Formatter of one JSON object a line.  `extra={"fields": {...}}` adds keys; with `event` among them the line is
    its fields.  They may be a function that returns them, called for such a line alone.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        given: Mapping[str, object] | Callable[[], Mapping[str, object]] = getattr(record, "fields", {})
        fields = given() if callable(given) else given
        entry: dict[str, object] = {
            "time": format_rfc3339(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
        }
        if request_id := _find_request_id(record):
            entry["request"] = request_id
        if "event" not in fields:
            entry["message"] = record.getMessage()
        entry |= fields
        if record.exc_info and record.exc_info[1] is not None:
            entry["traceback"] = format_traceback(record.exc_info[1])
        return json.dumps(entry)


def format_rfc3339(at: float) -> str:
    """Unix seconds as UTC time, to the millisecond."""
    milliseconds = int(at * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(milliseconds // 1000))}.{milliseconds % 1000:03d}Z"


# ---- exceptions


def format_traceback(error: BaseException) -> str:
    """Traceback as Python writes it, with the exceptions' texts redacted or left out."""
    lines: list[str] = []
    for each, link in reversed(_collect_causes(error)):
        lines.append("Traceback (most recent call last):\n")
        lines += traceback.format_tb(each.__traceback__)
        words = escape_unprintable(redact_error(each))
        lines.append(f"{type(each).__qualname__}{words and ': '}{words}\n{link}")
    return "".join(lines).rstrip("\n")


def _collect_causes(error: BaseException) -> list[tuple[BaseException, str]]:
    """Exception and its causes, each with the phrase that leads to the one before."""
    chain: list[tuple[BaseException, str]] = [(error, "")]
    while len(chain) < CAUSES_MAX:
        last = chain[-1][0]
        if last.__cause__ is not None:
            chain.append((last.__cause__, "\nThe above exception was the direct cause of the following exception:\n\n"))
        elif last.__context__ is not None and not last.__suppress_context__:
            chain.append((last.__context__, "\nDuring handling of the above exception, another one occurred:\n\n"))
        else:
            break
    return chain


def redact_error(error: BaseException) -> str:
    """Text of an exception that may be logged; "" where the text may quote a client."""
    module, words = type(error).__module__.partition(".")[0], str(error)[:MESSAGE_CHARS_MAX]
    if isinstance(error, OSError):  # it names files, and those are ours
        return words
    if module in OWN_PACKAGES:
        return redact(words)
    if module not in _UNSAFE_PACKAGES and (isinstance(error, _SAFE_ERRORS) or words.startswith("[")):  # so mlx's begin
        return redact(words, keep_names=False)
    return ""


def describe_error(error: BaseException) -> str:
    """Text of an exception that may be logged, else its class name."""
    return redact_error(error) or type(error).__qualname__


def log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of an event loop; asyncio's own logs the values that exceptions have."""
    log.error("%s", context.get("message", "the event loop failed"), exc_info=context.get("exception"))


def _install_exception_hooks() -> None:
    """Log uncaught exceptions of the main thread, other threads and destructors."""

    def log_exception(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, at)
        else:
            log.critical("the process ends because of an unexpected error", exc_info=(kind, error, at))

    def log_thread_exception(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
            name = failed.thread.name if failed.thread else "a thread"
            log.critical("%s ends because of an unexpected error", name, exc_info=failed.exc_value)

    def log_unraisable(failed: Any) -> None:
        log.error("an error in a place that can't raise it", exc_info=failed.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = log_exception, log_thread_exception, log_unraisable


def _enable_fault_handler(path: Path | None) -> None:
    """Write the frames of all threads to stderr, or to `path`, where a native library ends the process.

    A log can't be written or rotated at such a moment; the next start logs what the file has.
    """
    if path is None:
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or no file
            faulthandler.enable(sys.stderr)
        return
    try:
        disk.make_folders(path.parent)
        file = open_regular(path, os.O_RDWR | os.O_CREAT)
        earlier = os.read(file, FAULT_BYTES_MAX).decode(errors="replace").strip()
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        faulthandler.enable(file)
    except OSError as error:
        log.warning("faults of the process can't be recorded: %s", error)
        return
    if earlier:
        log.critical("the run before this one was ended by a fault:\n%s", earlier)


# ---- files


def _open_private(path: str, flags: int) -> int:
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)  # not waiting for a reader of a FIFO
    with suppress(OSError):  # another user's
        os.fchmod(file, 0o600)
    return file


class LogFileHandler(RotatingFileHandler):
    """Handler of a rotated log file with mode 0600, FILE_BYTES_MAX long at most; BACKUP_COUNT older ones are NAME.1 and
    so on.

    A line that the disk does not take goes to `fallback`, with the reason once; the next line is tried again.  `disk`
    is bypassed: a log is no part of what a home stores, and its failures must not count as such.
    """

    def __init__(
        self,
        path: Path,
        fallback: logging.Handler,
        bytes_max: int = FILE_BYTES_MAX,
        backup_count: int = BACKUP_COUNT,
    ) -> None:
        super().__init__(path, maxBytes=bytes_max, backupCount=backup_count, encoding="utf-8", delay=True)
        self._path, self._fallback = path, fallback
        self._has_failed = self._has_warned = False

    def _open(self) -> io.TextIOWrapper:
        """Open without a buffer: buffered bytes that could not be written would come twice, or in pieces."""
        disk.make_folders(self._path.parent)
        file = io.FileIO(self.baseFilename, "ab", opener=_open_private)
        return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", write_through=True)

    def emit(self, record: logging.LogRecord) -> None:
        self._has_failed = False
        super().emit(record)
        self._has_warned = self._has_warned and self._has_failed

    def handleError(self, record: logging.LogRecord) -> None:
        """Handle a line that could not be written."""
        self._has_failed, error = True, sys.exc_info()[1]
        if not isinstance(error, OSError):
            return  # the line itself is at fault
        if not self._has_warned:
            self._has_warned = True
            self._fallback.handle(_make_warning(record, f"the log can't be written to {self._path}: {error}"))
        self._fallback.handle(record)


def _make_warning(record: logging.LogRecord, problem: str) -> logging.LogRecord:
    message = f"{problem}; it goes to stderr meanwhile"
    return logging.LogRecord(log.name, logging.ERROR, record.pathname, record.lineno, message, (), None)
