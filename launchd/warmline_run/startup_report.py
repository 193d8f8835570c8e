"""Report of a start in a few lines, from GET /warmline/status."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmline_common.process.loopback import is_loopback
from warmline_common.settings.resolve import ResolvedConfig
from warmline_run import probe as asking
from warmline_run.address import Address, make_address

DISK_USAGE_NAMES = (
    "segments",
    "checkpoints",
    "quarantined",
    "writing",
    "doomed",
    "index",
)  # what counts against the disk budget
WIDTH = len("dashboard")
KEY_HINT = "the admin key opens it: cachectl key show admin"
REMOTE_KEY_HINT = "from other machines it asks for the admin key: cachectl key show admin"


def read_report(config: ResolvedConfig) -> str:
    """Of the pair that serves by these settings.  Blocks; "" where it does not tell."""
    address = make_address(config)
    return format_report(asking.read_status(address, Path(str(config["home"]))), config, address)


def format_report(status: Mapping[str, Any], config: ResolvedConfig, address: Address) -> str:
    """A line a fact; "" where the state is none that we know, such as another version's.  Pure."""
    try:
        facts = {
            "model": _format_model(status["engine"]),
            "context": _format_context(status["engine"]),
            "memory": f"{_format_bytes(status['engine']['memory_budget_bytes'])} for conversations",
            "disk": _format_disk(status["totals"], status["disk_budget_bytes"]),
            "kept": _format_persistence(status),
            "dashboard": _format_dashboard(config, address),
        }
    except (KeyError, TypeError, ValueError):
        return ""
    return "".join(f"{name:<{WIDTH}}  {said}\n" for name, said in facts.items())


def _format_model(engine: Mapping[str, Any]) -> str:
    return f"{engine['model']} on {engine['device']}, KV in {engine['layout']['dtype']}"


def _format_context(engine: Mapping[str, Any]) -> str:
    tokens = engine["context_tokens_max"]
    return f"{tokens:,} tokens" if tokens else "the model does not say how long"


def _format_disk(totals: Mapping[str, Any], budget_bytes: int) -> str:
    used = sum(totals[f"bytes_{part}"] for part in DISK_USAGE_NAMES)
    return (
        f"{_format_bytes(used)} of {_format_bytes(budget_bytes)} used: "
        f"{_format_stored(totals['sessions'], totals['tokens'])}"
    )


def _format_stored(conversations: int, tokens: int) -> str:
    if not conversations:
        return "no conversation is stored"
    return f"{conversations:,} conversation{'s' * (conversations > 1)}, {tokens:,} tokens"


def _format_persistence(status: Mapping[str, Any]) -> str:
    """Line about persistence."""
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
    here = address.admin_url
    behind = is_loopback(address.host) and config["allowed_hosts"]  # a proxy on this machine: local is nobody then
    if config["admin_needs_key"] or behind or not address.is_local:
        return f"{here} ({KEY_HINT})"
    return f"{here} ({REMOTE_KEY_HINT})" if address.is_wildcard else here


def _format_bytes(number: float) -> str:
    """In units of 1,000, as budgets are set."""
    for unit in ("B", "KB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"
