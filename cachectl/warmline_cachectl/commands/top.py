"""`cachectl top`: what the running pair is at, live."""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from warmline_cachectl import client
from warmline_cachectl.options import (
    EXIT_REFUSED,
    HOME,
    LOOK_GROUP,
    HomeOption,
    JsonOption,
    exit_on_error,
    fail,
    format_examples,
    make_home,
)
from warmline_cachectl.views import tables
from warmline_cachectl.views import top as top_view
from warmline_cachectl.views.output import show
from warmline_common.storage.home import Home

ASK_TIMEOUT_S = 5.0
RECORDS = 200  # whose reuse is told
QUIT_KEYS = ("q", "Q", "\x03", "\x04")
KEYS_BYTES = 64  # pressed between two looks

app = typer.Typer()


@app.command(
    short_help="Watch the running requests.",
    rich_help_panel=LOOK_GROUP,
    epilog=format_examples("cachectl top  # q ends it", "cachectl top --once", "cachectl top --json"),
)
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look, and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, max=86_400, help="Between two looks.")] = 1.0,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Requests with their phase and prefill, the queue, memory, disk, and how much of the prompts was reused.

    It asks the proxy, and keeps trying where none runs. Without a terminal it prints one look, as with --once.
    """
    place = make_home(home)
    with exit_on_error():
        client.check_home(place)
    if once or as_json or not sys.stdout.isatty():
        with exit_on_error():
            view = read_view(place, None)
        return show(view, [top_view.render_screen(view, tables.make_console().width)], as_json)
    _watch(place, interval_s)


def read_view(home: Home, before: dict[str, Any] | None) -> dict[str, Any]:
    """Raises client.CannotDo."""
    status = client.request_proxy(home, "/warmline/status", dict[str, Any], ASK_TIMEOUT_S)
    records = client.request_proxy(home, f"/warmline/requests?count={RECORDS}", dict[str, Any], ASK_TIMEOUT_S)
    try:
        return top_view.build_snapshot(status, records["requests"], before)
    except (KeyError, TypeError) as error:
        raise client.OperationRefusedError(
            f"the proxy answered otherwise than expected (another version?): {error!r}"
        ) from error


def _watch(home: Home, interval_s: float) -> None:
    view: dict[str, Any] | None = None
    for number in (signal.SIGTERM, signal.SIGHUP):  # else they end us with the terminal as no shell wants it
        signal.signal(number, signal.default_int_handler)
    try:
        with Live(console=tables.make_console(), screen=True, auto_refresh=False) as live, _open_keyboard() as pressed:
            while True:
                try:
                    view = read_view(home, view)
                    live.update(top_view.render_screen(view, live.console.width), refresh=True)
                except client.CachectlError as error:
                    view = None
                    live.update(Text(f"{error}; trying again, q ends"), refresh=True)
                if set(pressed(interval_s)) & set(QUIT_KEYS):
                    return
    except KeyboardInterrupt:
        return
    except OSError as error:
        fail(f"the terminal is gone: {error}", EXIT_REFUSED)


@contextmanager
def _open_keyboard() -> Iterator[Callable[[float], str]]:
    """Yields what waits so many seconds for keys; "" where none was pressed, or nobody can press one.

    A terminal that is gone is one on which its end was asked for.
    """
    if not sys.stdin.isatty():
        yield _wait_without_keyboard
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return os.read(descriptor, KEYS_BYTES).decode(errors="replace") or QUIT_KEYS[0] if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _wait_without_keyboard(timeout_s: float) -> str:
    time.sleep(timeout_s)
    return ""
