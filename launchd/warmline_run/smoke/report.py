"""What a run has found, for people and for programs.  Pure."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from warmline_run.smoke.check import FAILED, NOT_RUN, PASSED, Gate, Outcome, Visit

NAME_WIDTH, RESULT_WIDTH, SECONDS_WIDTH = 15, 7, 8
LINE_WIDTH = 120
INDENT = " " * (NAME_WIDTH + RESULT_WIDTH + SECONDS_WIDTH + 6)


def header(visit: Visit) -> str:
    """Who is examined, so that it can be done again, and the table's head."""
    who = f"{visit.server.url}, model {visit.server.model or '(none listed)'}, --seed {visit.seed}"
    return f"{who}\n\n{_row('gate', 'result', 'seconds', 'what it proves')}\n{'-' * LINE_WIDTH}"


def row(outcome: Outcome) -> str:
    """The gate's line, and what was seen under it."""
    lines = [_row(outcome.gate.name, outcome.result, f"{outcome.seconds:.1f}", outcome.gate.proves)]
    lines += _indented(outcome.detail)
    lines += _indented(f"-> {outcome.advice}") if outcome.advice else []
    return "\n".join(lines)


def _row(name: str, result: str, seconds: str, proves: str) -> str:
    return f"{name:<{NAME_WIDTH}}  {result:<{RESULT_WIDTH}}  {seconds:>{SECONDS_WIDTH}}  {proves}"


def _indented(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        LINE_WIDTH,
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    counts = [(sum(each.result == result for each in outcomes), result) for result in (PASSED, FAILED, NOT_RUN)]
    return ", ".join(f"{count} {result}" for count, result in counts if count)


def listing(gates: Sequence[Gate]) -> str:
    return "\n".join(f"{gate.name:<{NAME_WIDTH}}  {gate.proves}" for gate in gates)


def as_json(visit: Visit, outcomes: Sequence[Outcome], passed: bool) -> str:
    gates: list[dict[str, Any]] = [
        {
            "name": each.gate.name,
            "proves": each.gate.proves,
            "result": each.result.lower(),
            "seconds": round(each.seconds, 3),
            "detail": each.detail,
            "advice": each.advice,
        }
        for each in outcomes
    ]
    return json.dumps(
        {"url": visit.server.url, "model": visit.server.model, "seed": visit.seed, "passed": passed, "gates": gates},
        indent=2,
    )


def passed(outcomes: Sequence[Outcome], strict: bool) -> bool:
    """A gate that was not run fails only where that is wanted."""
    return not any(each.result == FAILED or (strict and each.result == NOT_RUN) for each in outcomes)
