"""`cachectl top`: the running pair's requests, memory and disk, live."""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from warmline_cachectl import client
from warmline_cachectl.errors import EXIT_REFUSED, exit_on_error, fail
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, make_home
from warmline_cachectl.views import tables
from warmline_cachectl.views import top as top_view
from warmline_cachectl.views.output import show
from warmline_common.settings.hints import add_home
from warmline_common.settings.parsers import make_amount_parser, make_option_parser
from warmline_common.storage.home import Home

ASK_TIMEOUT_S = 5.0
RECORDS = 200  # for the share of reuse
QUIT_KEYS = ("q", "Q", "\x03", "\x04")
KEYS_BYTES = 64  # pressed between two screens

app = CommandApp("Look")


_parse_interval = make_option_parser(make_amount_parser("seconds", 0.1, 86_400), typer.BadParameter)


@app.add("Watch the running requests.", "cachectl top  # q ends it", "cachectl top --once", "cachectl top --json")
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look, and end.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=0.1, max=86_400, parser=_parse_interval, help="Between two looks.")
    ] = 1.0,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Show requests with their phase and prefill, the queue, memory, disk, and the reused share of prompts.

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
    """Snapshot of the running proxy.  Raises CachectlError."""
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
    for number in (signal.SIGTERM, signal.SIGHUP):  # by default they would leave the terminal in cbreak mode
        signal.signal(number, signal.default_int_handler)
    try:
        with (
            Live(console=tables.make_console(), screen=True, auto_refresh=False) as live,
            _open_keyboard() as get_keys,
        ):
            while True:
                try:
                    view = read_view(home, view)
                    live.update(top_view.render_screen(view, live.console.width), refresh=True)
                except client.CachectlError as error:
                    view = None
                    live.update(Text(f"{add_home(str(error), home.root)}; trying again, q ends"), refresh=True)
                if set(get_keys(interval_s)) & set(QUIT_KEYS):
                    return
    except KeyboardInterrupt:
        return
    except (OSError, termios.error) as error:
        fail(f"the terminal is gone: {error}", EXIT_REFUSED)


@contextmanager
def _open_keyboard() -> Iterator[Callable[[float], str]]:
    """Yield a function that returns the keys pressed within some seconds; without a terminal it only waits.

    A terminal that is gone counts as the key that quits.
    """
    keyboard = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    with _open_signal_pipe() as signals:

        def get_keys(timeout_s: float) -> str:
            ready, _, _ = select.select([*keyboard, signals], [], [], timeout_s)
            pressed = keyboard and keyboard[0] in ready
            return os.read(keyboard[0], KEYS_BYTES).decode(errors="replace") or QUIT_KEYS[0] if pressed else ""

        if not keyboard:
            yield get_keys
            return
        before = termios.tcgetattr(keyboard[0])
        try:
            tty.setcbreak(keyboard[0])
            yield get_keys
        finally:
            with suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(keyboard[0], termios.TCSADRAIN, before)


@contextmanager
def _open_signal_pipe() -> Iterator[int]:
    """Yield a descriptor that a signal makes readable: one that comes just before a wait would not interrupt it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        signal.set_wakeup_fd(writer)
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)
