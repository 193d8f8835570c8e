"""Report of a start in a few lines, from GET /warmline/status."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmline_common.process.loopback import is_loopback
from warmline_common.settings.hints import format_command
from warmline_common.settings.resolve import ResolvedConfig
from warmline_run import probe
from warmline_run.address import Address, make_address

DISK_USAGE_NAMES = ("segments", "checkpoints", "quarantined", "writing", "doomed", "index")  # of the disk budget
WIDTH = len("dashboard")
SHOW_KEY_COMMAND = "cachectl key show admin"
WATCH_COMMAND = "cachectl top"
EXPLAIN_COMMAND = "cachectl explain"
MODELS_COMMAND = "warmline models ls"
UNFIT = "can't be loaded"


def read_report(config: ResolvedConfig) -> str:
    """Report of the pair that serves by these settings.  Blocks; "" where the proxy does not answer."""
    address = make_address(config)
    return format_report(probe.read_status(address, Path(str(config["home"]))), config, address)


def format_report(status: Mapping[str, Any], config: ResolvedConfig, address: Address) -> str:
    """A line a fact; "" where the status is of another form, such as another version's.  Pure."""
    try:
        engine, totals = status["engine"], status["totals"]
        is_idle = engine is None and bool(status["models"])  # none of several models is loaded
        conversations = totals["sessions"]
        used = sum(totals[f"bytes_{part}"] for part in DISK_USAGE_NAMES)
        stored = f"{conversations:,} conversation{'s' * (conversations > 1)}, {totals['tokens']:,} tokens"
        facts = {
            **({} if is_idle else _describe_engine(engine)),
            **_list_models(status, str(config["home"])),
            "disk": f"{_format_bytes(used)} of {_format_bytes(status['disk_budget_bytes'])} used: "
            + (stored if conversations else "no conversation is stored"),
            **({} if is_idle else {"kept": _format_persistence(status)}),
            "dashboard": _format_dashboard(config, address),
            "requests": f"{format_command(WATCH_COMMAND, str(config['home']))} shows them",
            "explain": f"{format_command(EXPLAIN_COMMAND, str(config['home']))} says why one was not warm",
        }
    except (KeyError, TypeError, ValueError):
        return ""
    return "".join(f"{name:<{WIDTH}}  {fact}\n" for name, fact in facts.items())


def choose_example_model(status: Mapping[str, Any]) -> str:
    """Name of the model for a first request: of several the default, or one that needs no load; "" for the only one."""
    models = [each for each in status.get("models", ()) if not _is_unfit(each)]
    running = [each for each in models if each["stage"] in ("loaded", "starting")]
    found = next((each for each in running if each["default"]), next(iter([*running, *models]), None))
    return str(found["name"]) if found else ""


def has_unknown_sizes(status: Mapping[str, Any]) -> bool:
    """True while the size of some model is read; it may turn out that it can't be loaded."""
    return any(not (each["need_bytes"] or each["reason"]) for each in status.get("models", ()))


def _describe_engine(engine: Mapping[str, Any]) -> dict[str, str]:
    tokens = engine["context_tokens_max"]
    return {
        "model": f"{engine['model']} on {engine['device']}, KV in {engine['layout']['dtype']}",
        "context": f"{tokens:,} tokens" if tokens else "the model does not say how long",
        "memory": f"{_format_bytes(engine['memory_budget_bytes'])} for conversations",
    }


def _list_models(status: Mapping[str, Any], home: str) -> dict[str, str]:
    """Line about several models; nothing about one."""
    models = status.get("models", ())
    unfit = [each["name"] for each in models if _is_unfit(each)]
    names = [f"{each['name']} ({UNFIT if each['name'] in unfit else each['stage']})" for each in models]
    why = f"; `{format_command(MODELS_COMMAND, home)}` says why" if unfit else ""
    return {"models": ", ".join(names) + why} if names else {}


def _is_unfit(model: Mapping[str, Any]) -> bool:
    return bool(model["reason"]) and model["stage"] in ("unloaded", "failed")


def _format_persistence(status: Mapping[str, Any]) -> str:
    layout = status["engine"]["layout"]
    if status["reuse"] == "off":
        return "nothing, since reuse is off"
    if not layout["persistent"]:
        return f"in memory alone: {layout['why_not']}"
    if status["persistence"] != "ok":
        return f"in memory alone, since saving fails: {status['persistence']}"
    if not status["disk_budget_bytes"]:
        return "in memory alone, since the disk budget is 0"
    return "on disk, across restarts"


def _format_dashboard(config: ResolvedConfig, address: Address) -> str:
    url, show_key = address.admin_url, format_command(SHOW_KEY_COMMAND, str(config["home"]))
    is_proxied = is_loopback(address.host) and config["allowed_hosts"]  # by this machine: no client is local then
    if config["admin_needs_key"] or is_proxied or not address.is_local:
        return f"{url} (the admin key opens it: {show_key})"
    return f"{url} (from other machines it asks for the admin key: {show_key})" if address.is_wildcard else url


def _format_bytes(number: float) -> str:
    """In units of 1,000, as budgets are set."""
    for unit in ("B", "KB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"
