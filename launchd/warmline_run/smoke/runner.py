"""Checks in their order, the examined server, and the run over it."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from warmline_common.process.loopback import is_loopback
from warmline_common.settings.quantization import make_quantization
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig
from warmline_common.settings.table import SETTINGS
from warmline_run import ports
from warmline_run.address import EXAMPLE_URL, Address, normalize_url
from warmline_run.smoke import report
from warmline_run.smoke.check import FAILED, NOT_RUN, Check, Outcome, Scale, Target
from warmline_run.smoke.checks import basic, concurrent, long_transcript, restart, tools
from warmline_run.smoke.client import NoAnswerError, ServerUnreachableError, SmokeClient
from warmline_run.smoke.judge import TOLERANCES_KV_BITS
from warmline_run.smoke.responses import parse_models

CHECKS = (
    Check("load", "the model is loaded, listed, and computes a token", basic.check_load),
    Check("completion", "a question has an answer, a finish and a usage", basic.check_completion),
    Check(
        "exact-answer", "the same question has the same answer; a forced value comes exactly", basic.check_exact_answer
    ),
    Check("streaming", "a stream has the text of the whole answer, and ends properly", basic.check_streaming),
    Check("tool-call", "a call that is required comes, and follows its schema", tools.check_tool_call),
    Check(
        "tool-result", "a tool's result is read, and the call's prompt is not computed again", tools.check_tool_result
    ),
    Check("three-at-once", "three clients at once each get their own answer", concurrent.check_three_at_once),
    Check("any-name", "any model name is served, and comes back", basic.check_any_name),
    Check("no-markup", "no marker of template, reasoning or tools is in the text", basic.check_no_markup),
    Check("long-transcript", "turn after turn, warm answers are the cold ones", long_transcript.check_long_transcript),
    Check("cancel", "a client that leaves frees the server, and its KV is kept", concurrent.check_cancel),
    Check("restart", "a conversation continues after the backend's end", restart.check_restart),
)
EXIT_PASSED, EXIT_FAILED, EXIT_UNREACHABLE = 0, 1, 2
GRID_TOKENS_AUTO = 8192  # where the settings leave the step to be measured: the largest that usually wins


def find_checks(names: Sequence[str]) -> Sequence[Check]:
    """Checks of these names, in their order; all where there are no names.  Raises ConfigurationError."""
    check_names = [check.name for check in CHECKS]
    for name in names:
        if name not in check_names:
            raise ConfigurationError(f"there is no gate {name!r}; there are {', '.join(check_names)}")
    return [check for check in CHECKS if not names or check.name in names]


@dataclass(frozen=True)
class Endpoint:
    """Server, with facts of the settings where it is their own."""

    url: str
    key: str = ""
    home: Path | None = None
    grid_tokens: int = 0
    tolerance: float = 0.0


def find_endpoint(config: ResolvedConfig, url: str, environment: Mapping[str, str]) -> Endpoint:
    """`url` is "" for the server of these settings: the running one of their home, wherever a flag has put it.

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
    return Endpoint(url, str(config["client_key"]), home, grid, _find_kv_tolerance(config))


def _find_kv_tolerance(config: ResolvedConfig) -> float:
    """Tolerance of quantized KV, by its coarsest numbers; 0.0 where it is not quantized."""
    quantization = make_quantization(
        config["kv_bits"], config["kv_group_size"], int(config["kv_boundary_layers"]), config["kv_boundary_bits"]
    )
    return TOLERANCES_KV_BITS[quantization.bits_min] if quantization else 0.0


def _has_address_variable(config: ResolvedConfig) -> bool:
    """True where a variable names the address.  The home's file names it only where no flag did."""
    return any(config.effective_settings[name].source == SETTINGS[name].variable for name in ("host", "port"))


def find_running_url(home: Path) -> str:
    """Base URL of the proxy that runs from this home; "" where none does."""
    proxy = ports.find_running_proxy(home)
    try:
        return normalize_url(proxy.url) if proxy else ""
    except ConfigurationError:
        return ""


def make_target(
    endpoint: Endpoint, scale: Scale, *, model: str, tolerance: float, timeout_s: float, seed: str
) -> Target:
    return Target(
        client=SmokeClient(endpoint.url, endpoint.key, timeout_s, model),
        seed=seed or secrets.token_hex(4),
        scale=scale,
        tolerance=tolerance or endpoint.tolerance,
        grid_tokens=endpoint.grid_tokens,
        home=endpoint.home,
    )


async def run_checks(target: Target, checks: Sequence[Check], *, as_json: bool = False, strict: bool = False) -> int:
    """Run the checks one after another and print each outcome as it comes.  Returns the exit code.

    `strict`: a check that was not run is a failure.
    """
    async with target.client:
        try:
            await _read_server_info(target)
        except NoAnswerError as error:
            is_unreachable = isinstance(error, ServerUnreachableError)
            hint = "; if it listens elsewhere, name that with --url" if is_unreachable else ""
            print(f"warmline: {error}{hint}", file=sys.stderr)
            return EXIT_UNREACHABLE
        if not as_json:
            print(report.render_header(target))
        outcomes: list[Outcome] = []
        for check in checks:
            outcomes.append(await check.evaluate(target))
            if not as_json:
                print(report.render_row(outcomes[-1]), flush=True)
    failures = (FAILED, NOT_RUN) if strict else (FAILED,)
    passed = not any(outcome.result in failures for outcome in outcomes)
    print(report.render_json(target, outcomes, passed) if as_json else f"\n{report.format_summary(outcomes)}")
    return EXIT_PASSED if passed else EXIT_FAILED


async def _read_server_info(target: Target) -> None:
    """Read the model's name and context, where the server lists them.

    Raises NoAnswerError where it lacks a key, or has its API elsewhere, on which each check would fail anew.
    """
    status, models = await target.client.get("/models")
    if status in (401, 403):
        raise NoAnswerError(f"{target.client.url} wants a key ({status}): set WARMLINE_CLIENT_KEY", status)
    if status == 404 and not target.client.model:
        raise NoAnswerError(
            f"{target.client.url}/models is not found (404): give the base URL of the server's OpenAI API, such as "
            f"--url {EXAMPLE_URL}, or, where it lists no models, --model as well",
            status,
        )
    first = next(iter(parse_models(models)), {})
    target.client.model = target.client.model or first.get("id", "")
    context = first.get("max_model_len")
    target.context_tokens = context if isinstance(context, int) else 0
