"""Shapes: the keys and types of what was answered, logged or stored, without its values.  Pure."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Shape = dict[str, str]  # by path of keys: the JSON types that were seen there
ANY_KEY = "*"  # for keys that are values: ids and tokens
ID = re.compile(r"(?<![0-9a-z])[0-9a-f]{8,64}(?![0-9a-z])")
MODEL_ON_DEVICE = re.compile(r"[0-9a-f]{64} .*")  # a fingerprint and the device's name
DIGITS = re.compile(r"\d+(?:\.\d+)?")
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? \S+")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
# Labels whose values are of a fixed set of words.  Which reasons and contexts there are depends on the run.
ENUMERATIONS = ("api", "by", "code", "door", "finish", "kind", "outcome", "phase", "source", "status", "why")
SERIES_SUFFIXES = ("_bucket", "_sum", "_count")


def shape(*values: Any) -> Shape:
    """Compute the union of the shapes of all values."""
    found: dict[str, set[str]] = {}
    for value in values:
        for path, kind in _walk("", value):
            found.setdefault(path, set()).add(kind)
    return {path or ".": "|".join(sorted(found[path])) for path in sorted(found)}


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    yield path, _kind(value)
    if path.endswith("accepted_by_source"):  # which sources there are, if any, depends on the run
        return
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _walk(f"{path}.{_key(path, key, below)}".lstrip("."), below)
    elif isinstance(value, list):
        for below in value:
            yield from _walk(f"{path}[]", below)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def _key(path: str, key: str, value: Any) -> str:
    is_token = path.endswith("top_logprobs[]") and isinstance(value, float)
    is_wait = path.endswith("waits") and isinstance(value, float)  # which reasons there are depends on the run
    return ANY_KEY if is_token or is_wait or ID.fullmatch(key) or MODEL_ON_DEVICE.fullmatch(key) else key


def without_ids(text: str) -> str:
    return ID.sub("ID", text)


# ---- server-sent events


def events(stream: bytes) -> dict[str, Shape]:
    """Collect by event name (or the data's type) the shape of all such events; the last line as it is."""
    seen: dict[str, list[Any]] = {}
    for name, data in _blocks(stream.decode()):
        value = json.loads(data) if data.startswith(("{", "[{")) else data
        kind = value.get("type") or value.get("object") if isinstance(value, dict) else ""
        label = name or (kind if isinstance(kind, str) else "") or ("error" if isinstance(value, dict) else data)
        seen.setdefault(label, []).append(value)
    return {label: shape(*values) for label, values in sorted(seen.items())}


def _blocks(stream: str) -> Iterator[tuple[str, str]]:
    """List (event, data) of each block; comments are left out."""
    for block in stream.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            yield fields.get("event", ""), fields.get("data", "")


# ---- metrics


def metrics(exposition: str) -> dict[str, Any]:
    """Collect by metric name: type, labels, and the values of labels that are enumerations."""
    lines = exposition.splitlines()
    types = dict(line.split(" ")[2:4] for line in lines if line.startswith("# TYPE "))
    labels: dict[str, dict[str, set[str]]] = {name: {} for name in types}
    for match in filter(None, (SAMPLE.fullmatch(line) for line in lines if not line.startswith("#"))):
        mine = labels[_family(match["name"], types)]
        for label, value in LABEL.findall(match["labels"] or ""):
            mine.setdefault(label, set()).add(value)
    return {name: _metric(types[name], labels[name]) for name in sorted(types)}


def _family(series: str, types: Mapping[str, str]) -> str:
    if series in types:
        return series
    return next(series.removesuffix(suffix) for suffix in SERIES_SUFFIXES if series.removesuffix(suffix) in types)


def _metric(kind: str, labels: Mapping[str, set[str]]) -> dict[str, Any]:
    """Describe a metric, with the buckets of a histogram."""
    shown = {name: sorted(labels[name]) if name in ENUMERATIONS else "any" for name in sorted(labels)}
    if "le" in labels:
        shown["le"] = " ".join(sorted(labels["le"], key=float))
    return {"type": kind, "labels": shown}


# ---- logs


def json_logs(lines: Iterable[str]) -> dict[str, Shape]:
    """Collect by process and event the keys of JSON lines."""
    seen: dict[str, list[Any]] = {}
    for line in lines:
        if line.startswith("{"):
            entry = json.loads(line)
            seen.setdefault(f"{entry['process']} {entry.get('event', 'message')}", []).append(entry)
    return {label: shape(*entries) for label, entries in sorted(seen.items())}


def perf_line(line: str) -> str:
    """Replace what differs from request to request by placeholders."""
    words = QUOTED.sub('"..."', line[line.index("PERF ") :])
    return DIGITS.sub("0", without_ids(words))
