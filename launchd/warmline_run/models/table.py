"""Models as a table for people.  Pure."""

from collections.abc import Iterator, Sequence

from warmline_common.process.arguments import GB, MB
from warmline_common.process.redaction import escape_unprintable
from warmline_run.models.client import ListedModel, ModelList

TITLES = ("model", "stage", "weights", "needs", "holds", "KV", "running", "waiting", "used", "")
NUMBER_COLUMNS = range(2, 9)
UNITS_S = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def format_models(listed: ModelList, now: float) -> Iterator[str]:
    """Lines of the table; `now` is Unix time.  A model needs so much at least, and holds so much while it is loaded."""
    rows = [TITLES, *(_make_row(model, now) for model in listed.models)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(TITLES))]
    for row in rows:
        yield _format_row(row, widths)
    yield from (f"{model.name}: {escape_unprintable(model.reason)}" for model in listed.models if model.reason)
    for model in listed.models:
        if model.wait_reason:
            yield f"requests wait for {model.name}: {escape_unprintable(model.wait_reason)}"
    if listed.keeper_problem:
        yield f"{listed.keeper_problem}: the stages are those it told last"
    if listed.keeper:
        held = sum(model.held_bytes for model in listed.models)
        yield f"memory: {format_memory(held) if held else 0} of {format_memory(listed.memory_bytes)} held"


def _make_row(model: ListedModel, now: float) -> tuple[str, ...]:
    return (
        escape_unprintable(model.name),
        model.stage,
        format_memory(model.weight_bytes),
        format_memory(model.need_bytes),
        format_memory(model.held_bytes),
        format_memory(model.kv_bytes),
        str(model.running),
        str(model.waiting),
        _format_age(now - model.last_used_at) if model.last_used_at else "never",
        escape_unprintable(", ".join(_list_marks(model))),
    )


def _list_marks(model: ListedModel) -> Iterator[str]:
    if model.default:
        yield "default"
    if model.pinned:
        yield "pinned"
    if model.idle_s:
        yield f"unloaded after {model.idle_s:g} s"
    if model.aliases:
        yield f"also {' and '.join(model.aliases)}"


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        f"{text:>{width}}" if at in NUMBER_COLUMNS else f"{text:<{width}}"
        for at, (text, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()


def format_memory(count: int) -> str:
    """Gigabytes as settings take them, or megabytes; "-" for 0, which is unknown, or nothing."""
    if count >= GB:
        return f"{count / GB:,.1f} GB"
    return f"{count / MB:,.{0 if count >= MB else 3}f} MB" if count else "-"


def _format_age(seconds: float) -> str:
    unit, length_s = next((each for each in UNITS_S if seconds >= each[1]), UNITS_S[-1])
    return f"{max(seconds, 0) / length_s:.0f}{unit} ago"
