"""All gates in their order, and running them: one after another, each with its outcome."""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from warmline_common.process.loopback import is_loopback
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig
from warmline_common.settings.table import SETTINGS
from warmline_run import ports
from warmline_run.address import Address
from warmline_run.smoke import report
from warmline_run.smoke.check import (
    FAILED,
    NOT_RUN,
    PASSED,
    Check,
    CheckFailedError,
    CheckNotRunError,
    Outcome,
    Scale,
    Target,
)
from warmline_run.smoke.checks.basic import (
    check_any_name,
    check_completion,
    check_exact_answer,
    check_load,
    check_no_markup,
    check_streaming,
)
from warmline_run.smoke.checks.concurrent import check_cancel, check_three_at_once
from warmline_run.smoke.checks.long_transcript import check_long_transcript
from warmline_run.smoke.checks.restart import check_restart
from warmline_run.smoke.checks.tools import check_tool_call, check_tool_result
from warmline_run.smoke.client import CHAT_PATH, NoAnswerError, ServerUnreachableError, SmokeClient
from warmline_run.smoke.judge import TOLERANCES_KV_BITS
from warmline_run.smoke.responses import MalformedAnswerError, parse_models

CHECKS = (
    Check("load", "the model is loaded, listed, and computes a token", check_load),
    Check("completion", "a question has an answer, a finish and a usage", check_completion),
    Check("exact-answer", "the same question has the same answer; a forced value comes exactly", check_exact_answer),
    Check("streaming", "a stream says what one piece says, and ends properly", check_streaming),
    Check("tool-call", "a call that is required comes, and follows its schema", check_tool_call),
    Check("tool-result", "a tool's result is read, and the call's prompt is not computed again", check_tool_result),
    Check("three-at-once", "three clients at once each get their own answer", check_three_at_once),
    Check("any-name", "any model name is served, and comes back", check_any_name),
    Check("no-markup", "no marker of template, thoughts or tools is in what is said", check_no_markup),
    Check("long-transcript", "turn after turn, warm answers are the cold ones", check_long_transcript),
    Check("cancel", "a client that leaves frees the server, and its work is kept", check_cancel),
    Check("restart", "a conversation goes on after the backend's end", check_restart),
)
REFUSAL_ADVICE = "what the server's log says of it is worth reading"


def find_checks(names: Sequence[str]) -> Sequence[Check]:
    """Those of these names, in their order; all where there are none.  Raises KeyError with one that is unknown."""
    known = {gate.name for gate in CHECKS}
    for name in names:
        if name not in known:
            raise KeyError(name)
    return [gate for gate in CHECKS if not names or gate.name in names]


async def iterate_outcomes(target: Target, checks: Sequence[Check]) -> AsyncIterator[Outcome]:
    """Each outcome as it comes.  A gate's failure does not keep the others from being tried."""
    for gate in checks:
        began_s = time.monotonic()
        result, detail, advice = await _run_check(target, gate)
        yield Outcome(gate, result, time.monotonic() - began_s, detail, advice)


async def _run_check(target: Target, check: Check) -> tuple[str, str, str]:
    try:
        return PASSED, await check.run(target), ""
    except CheckFailedError as failure:
        return FAILED, failure.seen, failure.advice
    except CheckNotRunError as reason:
        return NOT_RUN, str(reason), ""
    except NoAnswerError as error:
        return FAILED, str(error), REFUSAL_ADVICE
    except MalformedAnswerError as error:
        return FAILED, f"the answer is not OpenAI's: {error}", ""
    except TimeoutError:
        return FAILED, f"not done within {target.client.timeout_s:g} s", "see --timeout-s"


EXIT_PASSED, EXIT_FAILED, EXIT_UNREACHABLE = 0, 1, 2
EXAMPLE_URL = "http://127.0.0.1:8026/v1"
GRID_TOKENS_AUTO = 8192  # where the settings leave the step to be measured: the largest that usually wins


@dataclass(frozen=True)
class Endpoint:
    """The server, and what the settings say of it: nothing, where it isn't the one that they are of."""

    url: str
    key: str = ""
    home: Path | None = None
    grid_tokens: int = 0
    tolerance: float = 0.0


@dataclass(frozen=True)
class RunOptions:
    """Options of a run from the command line."""

    checks: Sequence[Check]
    as_json: bool = False
    strict: bool = False


def find_endpoint(config: ResolvedConfig, url: str, environment: Mapping[str, str]) -> Endpoint:
    """`url` is "" for the server of these settings: the one that runs from their home, wherever a flag has put it.

    A key in the home's file goes to no other server, and its owner's secret to none on another machine.  Raises
    ConfigurationError where `url` is no address.
    """
    listening, home = Address(str(config["host"]), int(config["port"])), Path(str(config["home"]))
    own, running = Address(listening.probe_host, listening.port).url, find_running_url(home)
    url = normalize_url(url) if url else (own if _has_address_variable(config) else running) or own
    if url not in (own, listening.url, running):
        key = environment.get(SETTINGS["client_key"].variable, "")
        return Endpoint(url, key, home if is_loopback(urlsplit(url).hostname or "") else None)
    step = config["prefill_step_size"]
    grid = (step if isinstance(step, int) else GRID_TOKENS_AUTO) if config["reuse"] == "exact" else 0
    return Endpoint(url, str(config["client_key"]), home, grid, TOLERANCES_KV_BITS.get(int(config["kv_bits"]), 0.0))


def _has_address_variable(config: ResolvedConfig) -> bool:
    """True where a variable names the address.  The home's file names it only where no flag did."""
    return any(config.effective_settings[name].source == SETTINGS[name].variable for name in ("host", "port"))


def find_running_url(home: Path) -> str:
    """The base URL of the proxy that runs from this home; "" where none does, or did and was killed."""
    found = ports.find_running_proxy(home)
    try:
        return normalize_url(found.url) if found else ""
    except ConfigurationError:
        return ""


def normalize_url(url: str) -> str:
    """Base URL of an API, from an address that may lack its /v1, or include the path of chat completions.

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


def make_target(
    endpoint: Endpoint, scale: Scale, *, model: str, tolerance: float, timeout_s: float, seed: str
) -> Target:
    server = SmokeClient(endpoint.url, endpoint.key, timeout_s, model)
    return Target(
        client=server,
        seed=seed or secrets.token_hex(4),
        scale=scale,
        tolerance=tolerance or endpoint.tolerance,
        grid_tokens=endpoint.grid_tokens,
        home=endpoint.home,
    )


def select_checks(names: Sequence[str]) -> Sequence[Check]:
    """All, where there are no names.  Raises ConfigurationError."""
    try:
        return find_checks(names)
    except KeyError as error:
        known = ", ".join(gate.name for gate in CHECKS)
        raise ConfigurationError(f"there is no gate {error.args[0]!r}; there are {known}") from None


def list_checks() -> str:
    return report.render_list(CHECKS)


def run_checks(target: Target, options: RunOptions) -> int:
    """Blocks until all gates are done; prints each as it ends.  Returns the exit code."""
    return asyncio.run(run_checks_async(target, options))


async def run_checks_async(target: Target, options: RunOptions) -> int:
    """The same, on a loop that runs already."""
    async with target.client:
        try:
            await _read_server_info(target)
        except NoAnswerError as error:
            elsewhere = (
                "; if it listens elsewhere, name that with --url" if isinstance(error, ServerUnreachableError) else ""
            )
            print(f"warmline: {error}{elsewhere}", file=sys.stderr)
            return EXIT_UNREACHABLE
        if not options.as_json:
            print(report.render_header(target))
        outcomes: list[Outcome] = []
        async for outcome in iterate_outcomes(target, options.checks):
            outcomes.append(outcome)
            if not options.as_json:
                print(report.render_row(outcome), flush=True)
    good = report.is_success(outcomes, options.strict)
    print(report.render_json(target, outcomes, good) if options.as_json else f"\n{report.format_summary(outcomes)}")
    return EXIT_PASSED if good else EXIT_FAILED


async def _read_server_info(target: Target) -> None:
    """Learn the model's name and context, where the server tells them.

    Raises Unanswered where it lets nobody in, or has its API elsewhere, which each gate would find out anew.
    """
    status, listed = await target.client.get("/models")
    if status in (401, 403):
        raise NoAnswerError(f"{target.client.url} wants a key ({status}): set WARMLINE_CLIENT_KEY", status)
    if status == 404 and not target.client.model:
        raise NoAnswerError(
            f"{target.client.url}/models is not found (404): give the base URL of the server's OpenAI API, such as "
            f"--url {EXAMPLE_URL}, or, where it lists no models, --model as well",
            status,
        )
    first = next(iter(parse_models(listed)), {})
    target.client.model = target.client.model or first.get("id", "")
    context = first.get("max_model_len")
    target.context_tokens = context if isinstance(context, int) else 0
