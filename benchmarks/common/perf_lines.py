"""PERF lines of pairs' logs: how far the planner's estimate of the time to the first token was off."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.results import find_quartiles, format_table

FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
SECONDS = re.compile(r"([\d.]+)s")
PART = re.compile(r"(\w+):([\d.]+)s")
NEAR = 0.2
HEADINGS = ("source", "requests", "error, median", "25 % to 75 %", "within 20 %", "first token, median", "expected")
PART_HEADINGS = ("part", "actual, median", "expected, median", "difference, median", "25 % to 75 %")


@dataclass(frozen=True)
class EstimateSample:
    source: str
    ttft_s: float
    expected_s: float
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)  # (actual, expected) seconds

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
                expected_parts = PART.findall(fields.get("expected_parts", ""))
                parts = {name: (_parse_seconds(fields, name), float(seconds)) for name, seconds in expected_parts}
                yield EstimateSample(fields.get("source", "?"), ttft_s, expected_s, parts)


def _parse_seconds(fields: Mapping[str, str], name: str) -> float:
    match = SECONDS.fullmatch(fields.get(name, ""))
    return float(match[1]) if match else 0.0


def format_estimates(samples: Sequence[EstimateSample]) -> str:
    """A table by source of the KV, and one by part of the time."""
    by_source = defaultdict(list)
    for sample in samples:
        by_source[sample.source].append(sample)
    rows = [_format_source(source, by_source[source]) for source in sorted(by_source)]
    tables = [format_table(HEADINGS, [*rows, _format_source("all", samples)] if samples else [])]
    parts = list(dict.fromkeys(part for sample in samples for part in sample.parts))
    if parts:
        tables.append(format_table(PART_HEADINGS, [_format_part(part, samples) for part in parts]))
    return "\n\n".join(tables)


def _format_source(source: str, samples: Sequence[EstimateSample]) -> list[str]:
    low, middle, high = find_quartiles([sample.error for sample in samples])
    near = sum(sample.error <= NEAR for sample in samples) / len(samples)
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


def _format_part(part: str, samples: Sequence[EstimateSample]) -> list[str]:
    pairs = [sample.parts[part] for sample in samples if part in sample.parts]
    _, actual_s, _ = find_quartiles([actual for actual, _ in pairs])
    _, expected_s, _ = find_quartiles([expected for _, expected in pairs])
    low, middle, high = find_quartiles([1e3 * abs(actual - expected) for actual, expected in pairs])
    return [part, f"{actual_s:.3f} s", f"{expected_s:.3f} s", f"{middle:.0f} ms", f"{low:.0f} to {high:.0f} ms"]
