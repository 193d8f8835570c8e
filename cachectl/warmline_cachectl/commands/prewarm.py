"""Command that has prompts computed ahead by the running pair."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from warmline_cachectl import client
from warmline_cachectl.errors import EXIT_FOUND, EXIT_USAGE, exit_on_error, fail
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, QuietOption, make_home
from warmline_cachectl.views import prewarm as views
from warmline_cachectl.views.output import show, show_spinner
from warmline_common.settings.prewarm import API_NAMES
from warmline_common.storage.home import Home
from warmline_proxy.prewarm.reports import FAILED, STORED, PrewarmReport, PrewarmRequest

POLL_INTERVAL_S = 0.2

app = CommandApp("Change")


@app.add(
    "Compute a prompt ahead, while the engine is idle.",
    "cachectl prewarm prompts/day.json --pin  # a file with a request's body",
    "cachectl prewarm --list  # what is configured, and its state",
)
def prewarm(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File with the JSON body of a request.", show_default=False)
    ] = None,
    api: Annotated[
        str, typer.Option(help=f"API of the body: {', '.join(API_NAMES)}; default: as the body shows.")
    ] = "",
    model: Annotated[str, typer.Option(help="One of several models, by name or alias; default: the first.")] = "",
    key: Annotated[str, typer.Option(help="The client key whose requests are to be warm, by its name.")] = "",
    pin: Annotated[bool, typer.Option("--pin", help="Keep it from being evicted.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is stored.")] = True,
    list_: Annotated[bool, typer.Option("--list", help="List configured prompts, and the last ones sent so.")] = False,
    quiet: QuietOption = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Have the running pair compute and store the prompt of a file, so that its first turn is warm.

    It makes way for requests, and goes on where it was; exit code 1 where it could not be stored.
    """
    if list_ == (file is not None):
        fail("name either FILE or --list", EXIT_USAGE)
    if file is None:
        with exit_on_error():
            reply = client.list_prewarmed(make_home(home))
        show(msgspec.to_builtins(reply), views.render_prewarms(reply.entries), as_json)
        return
    if not file.expanduser().is_file():
        fail(f"{file}: there is no such file; give one with the JSON body of a request", EXIT_USAGE)
    request = PrewarmRequest(path=str(file.expanduser().absolute()), api=api, model=model, key=key, pin=pin)
    with exit_on_error():
        report = client.prewarm(make_home(home), request)
        if wait:
            report = _wait_until_done(make_home(home), report, quiet)
    show(msgspec.to_builtins(report), [views.format_prewarm(report)], as_json)
    if report.state == FAILED:
        raise typer.Exit(EXIT_FOUND)


def _wait_until_done(home: Home, report: PrewarmReport, quiet: bool) -> PrewarmReport:
    with show_spinner("prewarming", quiet) as describe:
        while report.state not in (STORED, FAILED):
            time.sleep(POLL_INTERVAL_S)
            found = [each for each in client.list_prewarmed(home).entries if each.id == report.id]
            if not found:
                fail("the proxy has started anew meanwhile, and forgotten the prompt: send it again", EXIT_FOUND)
            (report,) = found
            describe(views.format_prewarm(report))
    return report
