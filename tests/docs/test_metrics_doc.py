"""docs/metrics.md lists exactly the metrics of both processes; their names follow Prometheus' rules."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from warmline_backend.config import parse_config
from warmline_backend.engine.engine import Engine
from warmline_backend.server.service import Service
from warmline_common.storage.home import Home
from warmline_proxy.app import build_app
from warmline_proxy.config import ProxyConfig
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import METRICS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
NO_LABELS = "–"  # noqa: RUF001  as the table has it
UNITS = ("_seconds", "_bytes", "_tokens", "_sequences", "_ratio")  # that a histogram may be in
NO_UNITS = ("milliseconds", "_ms", "minutes", "kilobytes", "megabytes", "_mb", "_gb", "percent", "_pct")

Facts = tuple[str, tuple[str, ...]]  # type and labels


def describe_metrics(registry: CollectorRegistry) -> dict[str, tuple[Facts, str]]:
    """Describe each metric by its name, type, labels and help, without the client library's own metrics."""
    found = {}
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if not family.name.startswith("warmline"):
                continue
            kind = "gauge" if family.type == "info" else family.type
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            labels = getattr(family, "_labelnames", ()) or getattr(collector, "_labelnames", ())
            if family.type == "info":
                labels = tuple(family.samples[0].labels)
            found[name] = ((kind, tuple(labels)), family.documentation)
    return found


def list_proxy_metrics(home: Home) -> dict[str, tuple[Facts, str]]:
    async def tell() -> dict[str, tuple[Facts, str]]:
        with Index(home, 1 << 30) as index:
            app = build_app(ProxyConfig(home=home), home.load_secret(), index)
            metrics = app[METRICS]
            for collector in metrics._registry._collector_to_names:
                if refresh := getattr(collector, "refresh", None):
                    await refresh()
            return describe_metrics(metrics._registry)

    return asyncio.run(tell())


def list_backend_metrics(home: Home) -> dict[str, tuple[Facts, str]]:
    async def tell() -> dict[str, tuple[Facts, str]]:
        config = parse_config(["--home", str(home.root), "--model", "none"])
        service = Service(config, home, Engine(raise_no_model), "boot")
        try:
            return describe_metrics(service.metrics._registry)
        finally:
            service.close()

    return asyncio.run(tell())


def raise_no_model() -> Any:
    raise AssertionError("the engine is not started")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Facts, str]]:
    home = Home(tmp_path_factory.mktemp("home"))
    home.prepare()
    proxy, backend = list_proxy_metrics(home), list_backend_metrics(home)
    assert not [name for name in proxy if name.startswith("warmline_backend_")]
    assert all(name.startswith("warmline_backend_") for name in backend)
    return proxy | backend


def test_metrics_doc_tables_are_complete(families: dict[str, tuple[Facts, str]]) -> None:
    documented = {
        name: (kind, () if labels == NO_LABELS else tuple(labels.split(", ")))
        for name, kind, labels, _ in ROW.findall(DOCUMENT)
    }
    assert documented == {name: facts for name, (facts, _) in families.items()}


def test_metrics_doc_lists_metrics_by_process() -> None:
    proxy, backend = DOCUMENT.split("## The backend's")
    assert "`warmline_backend_" not in proxy
    assert all(name.startswith("warmline_backend_") for name, *_ in ROW.findall(backend))


def test_metrics_doc_names_exist(families: dict[str, tuple[Facts, str]]) -> None:
    known = set(families)
    for name, ((kind, _), _) in families.items():
        if kind == "histogram":
            known |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    assert set(re.findall(r"\bwarmline_\w+", DOCUMENT)) <= known


def lint_metric(name: str, kind: str, labels: tuple[str, ...], about: str) -> list[str]:
    """Find what promtool reports, and some more."""
    rules: list[tuple[Callable[[], bool], str]] = [
        (lambda: re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) is not None, "a name in small letters"),
        (lambda: (kind == "counter") == name.endswith("_total"), "counters, and only these, end in _total"),
        (lambda: not name.endswith(("_count", "_sum", "_bucket", "_created")), "no suffix of a histogram's samples"),
        (lambda: kind != "histogram" or name.endswith(UNITS), "a histogram ends in its unit"),
        (lambda: not any(unit in name for unit in NO_UNITS), "base units"),
        (lambda: kind not in name.split("_"), "no type in the name"),
        (lambda: all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in labels), "labels in small letters"),
        (lambda: not {"le", "quantile", "job", "instance"} & set(labels), "no label of the scraper's"),
        (lambda: about.endswith(".") and not about[0].islower(), "help in a sentence"),
    ]
    return [f"{name}: {rule}" for holds, rule in rules if not holds()]


def test_metric_names_follow_prometheus_rules(families: dict[str, tuple[Facts, str]]) -> None:
    metrics = ((name, kind, labels, about) for name, ((kind, labels), about) in families.items())
    assert [problem for each in metrics for problem in lint_metric(*each)] == []


def test_metrics_doc_examples_are_valid_yaml() -> None:
    scrape, alerts = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL))
    targets = [config["static_configs"][0]["targets"] for config in scrape["scrape_configs"]]
    assert targets == [["127.0.0.1:8026"], ["127.0.0.1:8025"]]
    (group,) = alerts["groups"]
    assert len(group["rules"]) >= 4
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "annotations"} and rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
