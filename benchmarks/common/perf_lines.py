"""PERF lines of pairs' logs: how far the planner's estimate of the time to the first token was off."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.results import find_quartiles, format_table

FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
SECONDS = re.compile(r"([\d.]+)s")
HEADINGS = (
    "source",
    "requests",
    "median error",
    "25 % to 75 %",
    "within 20 %",
    "median first token",
    "median expected",
)


@dataclass(frozen=True)
class EstimateSample:
    source: str
    ttft_s: float
    expected_s: float

    @property
    def error(self) -> float:
        """Difference, as a share of the time that it took."""
        return abs(self.expected_s - self.ttft_s) / self.ttft_s


def parse_perf_line(line: str) -> dict[str, str]:
    """Fields by name, quoted texts with their quotes; none where the line has no PERF."""
    _, mark, fields = line.partition("PERF ")
    return dict(FIELD.findall(fields)) if mark else {}


def read_samples(logs: Iterable[Path]) -> Iterator[EstimateSample]:
    """One sample for each request that was answered and estimated."""
    for log in logs:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            fields = parse_perf_line(line)
            ttft_s, expected_s = _parse_seconds(fields, "ttft"), _parse_seconds(fields, "expected")
            if fields.get("outcome") == "ok" and ttft_s and expected_s:
                yield EstimateSample(fields.get("source", "?"), ttft_s, expected_s)


def _parse_seconds(fields: Mapping[str, str], name: str) -> float:
    match = SECONDS.fullmatch(fields.get(name, ""))
    return float(match[1]) if match else 0.0


def format_estimates(samples: Sequence[EstimateSample]) -> str:
    """A table by source of the KV, and of all."""
    by_source = defaultdict(list)
    for sample in samples:
        by_source[sample.source].append(sample)
    rows = [_format_row(source, by_source[source]) for source in sorted(by_source)]
    return format_table(HEADINGS, [*rows, _format_row("all", samples)] if samples else [])


def _format_row(source: str, samples: Sequence[EstimateSample]) -> list[str]:
    low, middle, high = find_quartiles([sample.error for sample in samples])
    near = sum(sample.error <= 0.2 for sample in samples) / len(samples)
    _, ttft_s, _ = find_quartiles([sample.ttft_s for sample in samples])
    _, expected_s, _ = find_quartiles([sample.expected_s for sample in samples])
    return [
        source,
        f"{len(samples):,}",
        f"{middle:.0%}",
        f"{low:.0%} to {high:.0%}",
        f"{near:.0%}",
        f"{ttft_s:.3f} s",
        f"{expected_s:.3f} s",
    ]
