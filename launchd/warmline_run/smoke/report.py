"""Reports of a run, for people and for programs.  Pure."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from warmline_run.smoke.check import FAILED, NOT_RUN, PASSED, Check, Outcome, Target

NAME_WIDTH, RESULT_WIDTH, SECONDS_WIDTH = 15, 7, 8
LINE_WIDTH = 120
INDENT = " " * (NAME_WIDTH + RESULT_WIDTH + SECONDS_WIDTH + 6)


def render_header(target: Target) -> str:
    """Lines that name the target, so that the run can be repeated, and the table's head."""
    server = f"{target.client.url}, model {target.client.model or '(none listed)'}, --seed {target.seed}"
    return f"{server}\n\n{_format_row('gate', 'result', 'seconds', 'what it proves')}\n{'-' * LINE_WIDTH}"


def render_row(outcome: Outcome) -> str:
    """The check's line, and its details under it."""
    lines = [_format_row(outcome.check.name, outcome.result, f"{outcome.seconds:.1f}", outcome.check.proves)]
    lines += _format_indented(outcome.detail)
    lines += _format_indented(f"-> {outcome.advice}") if outcome.advice else []
    return "\n".join(lines)


def _format_row(name: str, result: str, seconds: str, proves: str) -> str:
    return f"{name:<{NAME_WIDTH}}  {result:<{RESULT_WIDTH}}  {seconds:>{SECONDS_WIDTH}}  {proves}"


def _format_indented(text: str) -> list[str]:
    lines = textwrap.wrap(text, LINE_WIDTH - len(INDENT), break_long_words=False, break_on_hyphens=False)
    return [INDENT + line for line in lines]


def format_summary(outcomes: Sequence[Outcome]) -> str:
    counts = [(sum(each.result == result for each in outcomes), result) for result in (PASSED, FAILED, NOT_RUN)]
    return ", ".join(f"{count} {result}" for count, result in counts if count)


def render_list(checks: Sequence[Check]) -> str:
    return "\n".join(f"{check.name:<{NAME_WIDTH}}  {check.proves}" for check in checks)


def render_json(target: Target, outcomes: Sequence[Outcome], passed: bool) -> str:
    gates: list[dict[str, Any]] = [
        {
            "name": each.check.name,
            "proves": each.check.proves,
            "result": each.result.lower(),
            "seconds": round(each.seconds, 3),
            "detail": each.detail,
            "advice": each.advice,
        }
        for each in outcomes
    ]
    server = {"url": target.client.url, "model": target.client.model, "seed": target.seed}
    return json.dumps({**server, "passed": passed, "gates": gates}, indent=2)
