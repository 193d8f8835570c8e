"""`warmline gates` itself: whom to ask, reaching them, running, reporting; the exit code."""

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from warmline_run import ports
from warmline_run.address import Address
from warmline_run.settings.resolve import Config, ConfigurationError
from warmline_run.settings.schema import SETTINGS, is_loopback
from warmline_run.smoke import report
from warmline_run.smoke import runner as running
from warmline_run.smoke.check import Gate, Outcome, Scale, Visit
from warmline_run.smoke.client import CHAT_PATH, Server, Unanswered, Unreachable
from warmline_run.smoke.judge import TOLERANCES_KV_BITS
from warmline_run.smoke.responses import read_models

EXIT_PASSED, EXIT_FAILED, EXIT_UNREACHABLE = 0, 1, 2
EXAMPLE_URL = "http://127.0.0.1:8026/v1"
GRID_TOKENS_AUTO = 8192  # where the settings leave the step to be measured: the largest that usually wins


@dataclass(frozen=True)
class Target:
    """The server, and what the settings say of it: nothing, where it isn't the one that they are of."""

    url: str
    key: str = ""
    home: Path | None = None
    grid_tokens: int = 0
    tolerance: float = 0.0


@dataclass(frozen=True)
class Wanted:
    """What the command line asks of the report."""

    gates: Sequence[Gate]
    as_json: bool = False
    strict: bool = False


def target(config: Config, url: str, environment: Mapping[str, str]) -> Target:
    """`url` is "" for the server of these settings: the one that runs from their home, wherever a flag has put it.

    A key in the home's file goes to no other server, and its owner's secret to none on another machine.  Raises
    ConfigurationError where `url` is no address.
    """
    listening, home = Address(str(config["host"]), int(config["port"])), Path(str(config["home"]))
    own, running = Address(listening.probe_host, listening.port).url, running_url(home)
    url = base_url(url) if url else (own if _is_named(config) else running) or own
    if url not in (own, listening.url, running):
        key = environment.get(SETTINGS["client_key"].variable, "")
        return Target(url, key, home if is_loopback(urlsplit(url).hostname or "") else None)
    step = config["prefill_step_size"]
    grid = (step if isinstance(step, int) else GRID_TOKENS_AUTO) if config["reuse"] == "exact" else 0
    return Target(url, str(config["client_key"]), home, grid, TOLERANCES_KV_BITS.get(int(config["kv_bits"]), 0.0))


def _is_named(config: Config) -> bool:
    """Whether a variable says where to ask.  The home's file only says where its server listens if no flag did."""
    return any(config.origin[name].source == SETTINGS[name].variable for name in ("host", "port"))


def running_url(home: Path) -> str:
    """The base URL of the proxy that runs from this home; "" where none does, or did and was killed."""
    found = ports.running(home)
    try:
        return base_url(found.url) if found else ""
    except ConfigurationError:
        return ""


def base_url(url: str) -> str:
    """What clients are given, of an address that may lack its /v1, or lead on to where chats are completed.

    Raises ConfigurationError where it is no address of a server.
    """
    try:
        parts = urlsplit(url.strip())
        known = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        _ = parts.port
    except ValueError:
        known = None
    if not known:
        raise ConfigurationError(f"--url: expected an address such as {EXAMPLE_URL}, not {url!r}")
    path = parts.path.rstrip("/").removesuffix(CHAT_PATH)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def visit(target: Target, scale: Scale, *, model: str, tolerance: float, timeout_s: float, seed: str) -> Visit:
    server = Server(target.url, target.key, timeout_s, model)
    return Visit(
        server=server,
        seed=seed or secrets.token_hex(4),
        scale=scale,
        tolerance=tolerance or target.tolerance,
        grid_tokens=target.grid_tokens,
        home=target.home,
    )


def gates_called(names: Sequence[str]) -> Sequence[Gate]:
    """All, where there are no names.  Raises ConfigurationError."""
    try:
        return running.chosen(names)
    except KeyError as error:
        known = ", ".join(gate.name for gate in running.GATES)
        raise ConfigurationError(f"there is no gate {error.args[0]!r}; there are {known}") from None


def listing() -> str:
    return report.listing(running.GATES)


def examine(visit: Visit, wanted: Wanted) -> int:
    """Blocks until all gates are done; prints each as it ends.  Returns the exit code."""
    return asyncio.run(examine_visit(visit, wanted))


async def examine_visit(visit: Visit, wanted: Wanted) -> int:
    """The same, on a loop that runs already."""
    async with visit.server:
        try:
            await _meet(visit)
        except Unanswered as error:
            elsewhere = "; if it listens elsewhere, name that with --url" if isinstance(error, Unreachable) else ""
            print(f"warmline: {error}{elsewhere}", file=sys.stderr)
            return EXIT_UNREACHABLE
        if not wanted.as_json:
            print(report.header(visit))
        outcomes: list[Outcome] = []
        async for outcome in running.run(visit, wanted.gates):
            outcomes.append(outcome)
            if not wanted.as_json:
                print(report.row(outcome), flush=True)
    good = report.passed(outcomes, wanted.strict)
    print(report.as_json(visit, outcomes, good) if wanted.as_json else f"\n{report.summary(outcomes)}")
    return EXIT_PASSED if good else EXIT_FAILED


async def _meet(visit: Visit) -> None:
    """Learn the model's name and context, where the server tells them.

    Raises Unanswered where it lets nobody in, or has its API elsewhere, which each gate would find out anew.
    """
    status, listed = await visit.server.get("/models")
    if status in (401, 403):
        raise Unanswered(f"{visit.server.url} wants a key ({status}): set WARMLINE_CLIENT_KEY", status)
    if status == 404 and not visit.server.model:
        raise Unanswered(
            f"{visit.server.url}/models is not found (404): give the base URL of the server's OpenAI API, such as "
            f"--url {EXAMPLE_URL}, or, where it lists no models, --model as well",
            status,
        )
    first = next(iter(read_models(listed)), {})
    visit.server.model = visit.server.model or first.get("id", "")
    context = first.get("max_model_len")
    visit.context_tokens = context if isinstance(context, int) else 0
