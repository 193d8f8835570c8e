"""Results of a benchmark: flags that all scripts have, a markdown table for people, JSON with every value measured."""

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.servers import format_blas


def make_parser(description: str | None, has_model: bool = True, has_peer: bool = True) -> argparse.ArgumentParser:
    """A parser with --json, --quick, --model where any model will do, and --no-peer where there is one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value measured to this file")
    parser.add_argument("--quick", action="store_true", help="small and once: whether it works, not how fast")
    if has_model:
        parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model of your own, not the small one")
    if has_peer:
        parser.add_argument("--no-peer", action="store_true", help="leave out mlx_lm.server")
    return parser


def format_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_quartiles(values: Sequence[float], unit: str = "", scale: float = 1.0, digits: int = 2) -> str:
    """The median, with the quartiles where there are enough values for them."""
    known = [value * scale for value in values if math.isfinite(value)]
    if not known:
        return "failed"
    low, middle, high = find_quartiles(known)
    spread = f" ({low:.{digits}f} to {high:.{digits}f})" if len(known) > 2 else ""
    return f"{middle:.{digits}f}{unit}{spread}"


def find_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def print_results(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], notes: str = "") -> None:
    print(f"**{title}**\n\n{format_table(headings, rows)}\n")
    print(f"{notes + ' ' if notes else ''}{os.cpu_count()} cores. {format_blas()}.", flush=True)


def write_json(path: Path | None, measured: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write `measured` whole, or not at all; a value that is no number becomes null."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(_replace_nan(measured), indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def _replace_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _replace_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
