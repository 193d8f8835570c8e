"""Checks of `cachectl doctor` for common problems: symptom and remedy of each.  Pure functions over facts."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from warmline_cachectl.doctor.facts import Facts
from warmline_cachectl.views.tables import format_count, format_duration, format_size
from warmline_cachectl.views.top import bytes_used
from warmline_cachectl.views.values import normalize_reason
from warmline_common.protocol.keeper import ModelStage
from warmline_common.settings.hints import add_home
from warmline_proxy.explain.causes import CAUSES
from warmline_proxy.store.rows import RequestRecord

Status = Literal["ok", "warn", "fail"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"

DISK_FREE_SHARE_MIN = 0.05
DISK_FREE_BYTES_MIN = 2_000_000_000
HIT_SHARE_MIN = 0.5
HIT_REQUESTS_MIN = 20  # fewer say nothing
CLOCK_SLACK_S = 60.0
LOG_BYTES_MAX = 500_000_000
DESCRIPTORS_MIN = 4_096
MEMORY_SHARE_MAX = 0.85
SHOWN_MAX = 3  # of many things
REPAIR_COMMAND = "`cachectl verify --repair`"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    status: Status
    seen: str
    mend: str = ""  # the remedy; "" where nothing is to be done


def check_home(facts: Facts) -> Diagnosis:
    if not facts.has_home:
        return Diagnosis(FAIL, f"no home at {facts.home}", "name one with --home or WARMLINE_HOME, or `warmline serve`")
    return Diagnosis(OK, str(facts.home))


def check_modes(facts: Facts) -> Diagnosis:
    if facts.open_modes:
        return Diagnosis(
            FAIL, f"open to other users: {_format_some(facts.open_modes)}", f"chmod -R go-rwx {facts.home}"
        )
    return Diagnosis(OK, "file permissions ok")


def check_lock(facts: Facts) -> Diagnosis:
    if not facts.lock_holder:
        return Diagnosis(OK, "not held")
    seen = f"process {facts.lock_holder} holds the home"
    if facts.status is not None:
        return Diagnosis(OK, seen)
    mend = f"see what it is (ps -p {facts.lock_holder}), and end it if it hangs"
    return Diagnosis(FAIL, f"{seen}, and no proxy answers", mend)


def check_proxy(facts: Facts) -> Diagnosis:
    if facts.status is not None:
        return Diagnosis(OK, f"runs at {facts.proxy_url}")
    return Diagnosis(WARN, facts.proxy_error, "start it: `warmline serve`")


def check_run_files(facts: Facts) -> Diagnosis:
    seen = [f"{name} names process {pid}, which is gone" for name, pid in facts.run_files.items()]
    seen += [f"{name} names process {pid}, which is another program" for name, pid in facts.foreign_run_files.items()]
    if seen:
        return Diagnosis(WARN, _format_some(seen), "it was killed: `warmline serve` starts it anew and clears up")
    return Diagnosis(OK, "none is stale")


def check_backend(facts: Facts) -> Diagnosis | None:
    if facts.status is None:
        return None
    engine = facts.status["engine"]
    if problem := facts.status["backend"] or (engine and engine.get("failure")):
        return Diagnosis(FAIL, problem, "see its log; `warmline doctor` examines the model")
    if models := facts.status.get("models"):  # of several
        return _diagnose_models(models)
    return Diagnosis(OK, f"serves {engine['model']}" if engine else "answers")


def _diagnose_models(models: Sequence[Mapping[str, Any]]) -> Diagnosis:
    seen = ", ".join(f"{model['name']}: {model['stage']}" for model in models)
    todo = "`warmline models ls` says why; `warmline doctor` examines the models"
    if any(model["stage"] == ModelStage.FAILED for model in models):
        return Diagnosis(FAIL, seen, todo)
    if unfit := [model["name"] for model in models if model["reason"] and model["stage"] == ModelStage.UNLOADED]:
        return Diagnosis(WARN, f"{seen}; can't be loaded: {', '.join(unfit)}", todo)
    return Diagnosis(OK, seen)


def check_ports(facts: Facts) -> Diagnosis | None:
    if facts.status is not None:
        return None
    if facts.ports_taken:
        seen = " and ".join(map(str, facts.ports_taken))
        return Diagnosis(FAIL, f"{seen} taken by another program", "end it, or choose others: --port, --backend-port")
    return Diagnosis(OK, f"{facts.settings.port} and {facts.settings.backend_port} are free")


def check_disk(facts: Facts) -> Diagnosis:
    machine, totals = facts.machine, facts.index.totals
    if facts.status:
        budget, used = int(facts.status["disk_budget_bytes"]), bytes_used(facts.status["totals"])
    else:
        budget, used = facts.settings.disk_budget_bytes, totals.bytes_used if totals else 0
    free = f"{format_size(machine.disk_bytes_free)} free of {format_size(machine.disk_bytes)}"
    if machine.disk_bytes_free < max(DISK_FREE_BYTES_MIN, machine.disk_bytes * DISK_FREE_SHARE_MIN):
        return Diagnosis(FAIL, f"nearly full: {free}", "make room: `cachectl gc --to-gb N`, or delete other files")
    if budget > used + machine.disk_bytes_free:
        seen = f"the budget of {format_size(budget)} is more than there is: {free}, {format_size(used)} used"
        return Diagnosis(WARN, seen, "lower disk_budget_gb, or make room")
    return Diagnosis(OK, f"{format_size(used)} of the budget of {format_size(budget)} used; {free}")


def check_persistence(facts: Facts) -> Diagnosis | None:
    if facts.status is None:
        return None
    if (state := facts.status["persistence"]) != "ok":
        return Diagnosis(FAIL, f"KV can't be saved: {state}", "see docs/resilience.md")
    return Diagnosis(OK, "works")


def check_index(facts: Facts) -> Diagnosis:
    found = facts.index
    if found.problem.startswith("no index"):
        return Diagnosis(OK, "nothing was ever stored")
    if found.problem:
        return Diagnosis(FAIL, found.problem, REPAIR_COMMAND)
    if found.findings:
        counts = ", ".join(f"{what} {count}" for what, count in Counter(each.what for each in found.findings).items())
        return Diagnosis(FAIL, f"{format_count(len(found.findings), 'finding')}: {counts}", REPAIR_COMMAND)
    return Diagnosis(OK, f"{format_count(found.totals.segments if found.totals else 0, 'segment')}, all ok")


def check_quarantine(facts: Facts) -> Diagnosis | None:
    totals = facts.index.totals
    if totals is None:
        return None
    if totals.quarantined:
        files = f"{format_count(totals.quarantined, 'file')}, {format_size(totals.bytes_quarantined)}"
        return Diagnosis(WARN, files, "`cachectl inspect` says why; eviction takes them first")
    return Diagnosis(OK, "empty")


def check_reuse(facts: Facts) -> Diagnosis:
    if facts.settings.reuse == "off":
        return Diagnosis(WARN, "it is off: every prompt is computed anew", "reuse = fast, or exact")
    return Diagnosis(OK, facts.settings.reuse)


def check_hit_rate(facts: Facts) -> Diagnosis:
    records = [record for record in facts.index.records if record.reached_tokens]
    prompt, cached = (sum(getattr(each, name) for each in records) for name in ("reached_tokens", "cached_tokens"))
    share = cached / prompt if prompt else 0.0
    seen = f"{share:.0%} of the prompts of the last {format_count(len(records), 'request')} reused"
    if len(records) < HIT_REQUESTS_MIN or share >= HIT_SHARE_MIN:
        return Diagnosis(OK, seen)
    why, mend = _find_commonest_miss(records)
    return Diagnosis(WARN, f"{seen}; most often: {why}" if why else seen, mend)


def _find_commonest_miss(records: list[RequestRecord]) -> tuple[str, str]:
    """(reason, remedy) of the misses that cost the most tokens."""
    causes: Counter[str] = Counter()
    for record in records:
        missed = record.reached_tokens - record.cached_tokens
        if record.parting and record.parting.cause in CAUSES:
            causes[record.parting.cause] += missed
        elif record.why_not_warmer:
            causes[normalize_reason(record)] += missed
    if not causes:
        return "", "`cachectl stats` has the reasons"
    ((cause, _),) = causes.most_common(1)
    if cause in CAUSES:
        return CAUSES[cause].meaning, CAUSES[cause].advice or "`cachectl explain` shows where"
    return cause, "`cachectl explain` shows where"


def check_fingerprint(facts: Facts) -> Diagnosis | None:
    """Check for more namespaces of a model than keys: its weights, config or code have changed."""
    if facts.index.totals is None:
        return None
    roots_max, roots = 1 + facts.keys + facts.settings.key_in_settings, facts.index.roots
    if several := [f"{name} is stored under {count} identities" for name, count in roots.items() if count > roots_max]:
        changed = "its files, its keys, kv_bits, the draft model, or in exact mode the libraries"
        seen = f"{_format_some(several)}: {changed}, have changed"
        return Diagnosis(WARN, seen, "old data is evicted in time, or with `cachectl purge --older-than 7d`")
    return Diagnosis(OK, "nothing stored belongs to an earlier state of a model")


def check_keys(facts: Facts) -> Diagnosis:
    if facts.keys_problem:
        return Diagnosis(FAIL, facts.keys_problem, "`cachectl key list`; restore the file, or make keys anew")
    count = facts.keys + facts.settings.key_in_settings
    keys = format_count(count, "client key")
    if facts.settings.on_loopback:
        return Diagnosis(OK, f"{keys}, and only this machine can connect")
    if not count and not facts.settings.lan:
        seen = f"host {facts.settings.host} lets other machines connect, and there is no client key"
        return Diagnosis(FAIL, seen, "use --lan, which makes one, or `cachectl key add NAME`")
    return Diagnosis(OK, f"{keys}; plain HTTP: in a network that you trust, or behind TLS")


def check_allowed_hosts(facts: Facts) -> Diagnosis | None:
    if "*" in facts.settings.allowed_hosts.split(","):
        seen = "any name may be in Host: a web page can have a browser here ask this server"
        return Diagnosis(WARN, seen, "name the names: allowed_hosts = my-mac.example")
    return None


def check_clock(facts: Facts) -> Diagnosis | None:
    latest = max((record.at for record in facts.index.records), default=0.0)
    if latest > facts.machine.now + CLOCK_SLACK_S:
        seen = f"records lie {format_duration(latest - facts.machine.now)} in the future"
        return Diagnosis(WARN, seen, "set the clock; ages are wrong until then")
    return Diagnosis(OK, "records lie in the past")


def check_logs(facts: Facts) -> Diagnosis:
    if facts.log_bytes > LOG_BYTES_MAX:
        return Diagnosis(WARN, f"{format_size(facts.log_bytes)} in {facts.home / 'logs'}", "delete the old ones")
    return Diagnosis(OK, format_size(facts.log_bytes))


def check_descriptors(facts: Facts) -> Diagnosis:
    soft, hard = facts.machine.descriptors_soft, facts.machine.descriptors_hard
    most = max(soft, hard) if min(soft, hard) >= 0 else DESCRIPTORS_MIN  # -1: no limit
    if most < DESCRIPTORS_MIN:
        return Diagnosis(WARN, f"at most {most} files may be open", f"ulimit -n {2 * DESCRIPTORS_MIN}")
    return Diagnosis(OK, "no limit" if soft < 0 else f"{soft:,}, raised at a start where it must be")


def check_memory(facts: Facts) -> Diagnosis | None:
    if not (facts.status and (engine := facts.status["engine"])):
        return None
    there, models = facts.machine.memory_bytes, facts.status.get("models", [])
    budgets = {f" of {each['name']}": each["kv_bytes"] for each in models if each["kv_bytes"]}
    budgets = budgets or {"": engine["memory_budget_bytes"]}
    budget, parts = sum(budgets.values()), [f"{format_size(n)} for conversations{of}" for of, n in budgets.items()]
    seen = f"{' and '.join(parts)}, of the machine's {format_size(there)}"
    if budget > there * MEMORY_SHARE_MAX and not facts.machine.has_gpu:
        return Diagnosis(WARN, seen, "lower memory_budget_gb, or leave it 0: as the machine allows")
    return Diagnosis(OK, seen)


def check_wired_limit(facts: Facts) -> Diagnosis | None:
    """The part of the memory that macOS lets the GPU have, some three quarters unless configured otherwise.

    What mlx keeps wired of it is `wired_limit_gb`, which `warmline doctor` explains for a model.
    """
    limit = facts.machine.wired_limit_mb.strip()
    if facts.machine.system != "darwin" or not limit.isdigit():
        return None
    if int(limit):
        return Diagnosis(OK, f"the GPU may have {format_size(int(limit) * 1 << 20)}")
    return Diagnosis(OK, "the system's own; a model that needs more: sudo sysctl iogpu.wired_limit_mb=N")


def check_sleep(facts: Facts) -> Diagnosis | None:
    found = re.search(r"^\s*sleep\s+(\d+)", facts.machine.power, flags=re.MULTILINE)
    if facts.machine.system != "darwin" or found is None:
        return None
    if int(found[1]):
        seen = f"this machine sleeps after {format_count(int(found[1]), 'minute')} without use"
        return Diagnosis(WARN, seen, "sudo pmset -c sleep 0, or run it under caffeinate -s")
    return Diagnosis(OK, "it stays awake")


def check_launchd(facts: Facts) -> Diagnosis | None:
    """Lines of `launchctl list`: pid or "-", last exit status, label."""
    lines = [line.split(None, 2) for line in facts.machine.agents.splitlines() if "warmline" in line]
    if not lines:
        return None
    failing = [label for pid, code, label in lines if pid == "-" and code not in ("0", "-")]
    if failing:
        return Diagnosis(FAIL, f"loaded, but failing: {_format_some(failing)}", "`warmline launchd logs`")
    return Diagnosis(OK, f"{format_count(len(lines), 'agent')} loaded")


def check_blas(facts: Facts) -> Diagnosis | None:
    if facts.machine.system != "linux" or facts.machine.has_gpu:
        return None
    if not facts.machine.has_openblas:
        seen = "no OpenBLAS found: prefill on this CPU is about ten times slower than it could be"
        return Diagnosis(WARN, seen, "on Debian or Ubuntu: sudo apt-get install libopenblas0-pthread")
    return Diagnosis(OK, "OpenBLAS is there")


CHECKS: dict[str, Callable[[Facts], Diagnosis | None]] = {
    "home": check_home,
    "modes": check_modes,
    "lock": check_lock,
    "proxy": check_proxy,
    "run files": check_run_files,
    "backend": check_backend,
    "ports": check_ports,
    "saving": check_persistence,
    "disk": check_disk,
    "index": check_index,
    "quarantine": check_quarantine,
    "reuse": check_reuse,
    "hit rate": check_hit_rate,
    "fingerprint": check_fingerprint,
    "keys": check_keys,
    "allowed_hosts": check_allowed_hosts,
    "clock": check_clock,
    "logs": check_logs,
    "descriptors": check_descriptors,
    "memory": check_memory,
    "wired limit": check_wired_limit,
    "sleep": check_sleep,
    "launchd": check_launchd,
    "BLAS": check_blas,
}


def run_checks(facts: Facts) -> dict[str, Diagnosis]:
    """Diagnoses of all checks that apply, in their order; without a home the first alone."""
    checks = CHECKS.items() if facts.has_home else [("home", check_home)]
    diagnoses = {name: found for name, check in checks if (found := check(facts)) is not None}
    return {
        name: Diagnosis(found.status, add_home(found.seen, facts.home), add_home(found.mend, facts.home))
        for name, found in diagnoses.items()
    }


def _format_some(items: list[str]) -> str:
    more = len(items) - SHOWN_MAX
    return "; ".join(items[:SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")
