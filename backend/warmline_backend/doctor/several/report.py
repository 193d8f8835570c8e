"""Reports on several models: one after another, then together; and JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from warmline_backend.doctor import report
from warmline_backend.doctor.findings import FindingLevel, escape_text
from warmline_backend.doctor.several.examinations import SeveralExaminations
from warmline_backend.doctor.several.fit import FitPlan, RoundedFit, round_fit
from warmline_common.process.arguments import GB, MB
from warmline_common.protocol.keeper import CONTEXT_TOKENS_MIN

SHOWN_MAX = 8  # of sets, pairs and names
TITLES = ("model", "weights", "a prefill step", f"KV of {CONTEXT_TOKENS_MIN:,} tokens", "needs", "")


def convert_several_to_json(examined: SeveralExaminations) -> dict[str, Any]:
    """Examinations and their plan as plain values."""
    fit, models = examined.fit, zip(examined.models, examined.examinations, strict=True)
    return {
        "servable": examined.is_servable,
        "models": [
            {"name": model.name, "pinned": model.pinned, **report.convert_to_json(examination)}
            for model, examination in models
        ],
        "machine": examined.machine.description,
        "together": {**asdict(fit), "all": fit.is_all},
    }


def print_several(examined: SeveralExaminations, console: Console | None = None) -> None:
    """Print each model's findings, then the memory of all at once: alone, each has more than beside the others."""
    out = console or report.make_console()
    for model, examination in zip(examined.models, examined.examinations, strict=True):
        heading = f"{escape_text(model.name)}{', pinned' if model.pinned else ''}"
        out.print(Text(heading, style="bold"), soft_wrap=True)
        report.print_findings(examination, out, left_out="memory")
        out.print()
    rounded = round_fit(examined.needs, examined.fit.memory_bytes)
    out.print(Text("Memory", style="bold"))
    out.print(_render_needs(rounded))
    out.print(Text(_describe_memory(examined, rounded)), soft_wrap=True)
    for level, line in (*_describe_unknown(examined), *describe_fit(rounded)):
        out.print(Text(line, style=report.LEVEL_STYLES[level]), soft_wrap=True)


def _render_needs(rounded: RoundedFit) -> Table:
    table = Table(*TITLES, header_style="", box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for need in rounded.needs:
        sizes = (format_amount(part, rounded.step_bytes) for part in (*need.parts, need.need_bytes))
        table.add_row(escape_text(need.name), *sizes, "pinned" if need.is_pinned else "")
    sums = [sum(parts) for parts in zip(*(need.parts for need in rounded.needs), strict=True)]
    table.add_row("all", *(format_amount(count, rounded.step_bytes) for count in (*sums, sum(sums)) if rounded.needs))
    return table


def format_amount(count: int, step_bytes: int) -> str:
    """Bytes, a multiple of the step, with the digits that show it: in MB below 1 GB, where the step allows it."""
    unit, name = (GB, "GB") if max(count, step_bytes * 10) >= GB else (MB, "MB")
    digits = max(0, len(str(unit)) - len(str(step_bytes)))
    return f"{count / unit:,.{digits}f} {name}"


def _describe_memory(examined: SeveralExaminations, rounded: RoundedFit) -> str:
    memory, machine = format_amount(rounded.fit.memory_bytes, rounded.step_bytes), examined.machine
    limit, set_gb = "", f"models_memory_gb is {examined.models_memory_gb:g}"
    if examined.fit.memory_bytes < machine.usable_bytes:
        limit = f"{set_gb}; "
    elif examined.models_memory_gb * GB > machine.usable_bytes:
        limit = f"{set_gb}, which is more than there is; "
    return f"For all models there are {memory} ({limit}{machine.description})."


def _describe_unknown(examined: SeveralExaminations) -> Iterator[tuple[FindingLevel, str]]:
    names = [
        model.name
        for model, examination in zip(examined.models, examined.examinations, strict=True)
        if examination.plan is None
    ]
    if names:
        yield FindingLevel.WARN, f"The need of {_join(names, ' and ')} is not known: see FAIL above."


def describe_fit(rounded: RoundedFit) -> Iterator[tuple[FindingLevel, str]]:
    """Lines about the models that never fit, and the sets that do."""
    fit, needs = rounded.fit, {need.name: need for need in rounded.needs}
    amount = partial(format_amount, step_bytes=rounded.step_bytes)
    for name in fit.too_large:
        missing = amount(needs[name].need_bytes - fit.memory_bytes)
        yield FindingLevel.FAIL, f"{escape_text(name)} can never be loaded: it needs {missing} more than there are."
    if fit.is_pinned_too_large:
        pinned, missing = _join(fit.pinned, " + "), amount(fit.pinned_bytes - fit.memory_bytes)
        yield (
            FindingLevel.FAIL,
            f"Pinned models don't fit together ({pinned}): {missing} more are needed than there are.",
        )
        return
    for name in fit.beside_pinned:
        missing = amount(needs[name].need_bytes + fit.pinned_bytes - fit.memory_bytes)
        yield (
            FindingLevel.FAIL,
            f"{escape_text(name)} can never be loaded: it needs {missing} more than there are beside "
            f"what is pinned ({_join(fit.pinned, ' + ')}).",
        )
    yield from _describe_sets(fit)


def _describe_sets(fit: FitPlan) -> Iterator[tuple[FindingLevel, str]]:
    if len(fit.sets) < 2:
        for names in fit.sets:
            others = "The others" if fit.unservable else "All"
            fitting = f"{others} fit together ({_join(names, ' + ')})" if len(names) > 1 else f"{_join(names, '')} fits"
            yield FindingLevel.OK, f"{fitting}: none is unloaded for another."
        return
    yield FindingLevel.WARN, "They don't all fit together: a request for one may have another one unloaded."
    yield FindingLevel.OK, f"Fit together: {_join_sets(fit.sets, ' + ')}"
    if fit.pairs:
        yield FindingLevel.WARN, f"Never loaded together: {_join_sets(fit.pairs, ' and ')}"


def _join(names: Sequence[str], between: str) -> str:
    return between.join([*map(escape_text, names[:SHOWN_MAX]), *_count_more(len(names))])


def _join_sets(sets: Sequence[tuple[str, ...]], between: str) -> str:
    return "; ".join([*(_join(names, between) for names in sets[:SHOWN_MAX]), *_count_more(len(sets))])


def _count_more(count: int) -> list[str]:
    return [f"{count - SHOWN_MAX} more (--json has all)"] if count > SHOWN_MAX else []
