"""`cachectl doctor`'s judgement: what commonly goes wrong, how it is seen, and its mend.  Pure functions over facts."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from warmline_cachectl.doctor.facts import Facts
from warmline_cachectl.views.tables import format_count, format_duration, format_size
from warmline_cachectl.views.top import bytes_used
from warmline_cachectl.views.values import normalize_reason
from warmline_proxy.explain.causes import CAUSES
from warmline_proxy.store.rows import RequestRecord

Status = Literal["ok", "warn", "fail"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"

DISK_FREE_SHARE_MIN = 0.05
DISK_FREE_BYTES_MIN = 2_000_000_000
HIT_SHARE_MIN = 0.5
HIT_REQUESTS_MIN = 20  # fewer tell nothing
CLOCK_SLACK_S = 60.0
LOG_BYTES_MAX = 500_000_000
DESCRIPTORS_MIN = 4_096
MEMORY_SHARE_MAX = 0.85
SHOWN_MAX = 3  # of many things


@dataclass(frozen=True, slots=True)
class Diagnosis:
    name: str
    status: Status
    seen: str
    mend: str = ""  # what to do; "" where there is nothing to do


def check_home(facts: Facts) -> Diagnosis:
    if not facts.has_home:
        return Diagnosis(
            "home", FAIL, f"no home at {facts.home}", "name one with --home or WARMLINE_HOME, or `warmline serve`"
        )
    return Diagnosis("home", OK, str(facts.home))


def check_modes(facts: Facts) -> Diagnosis:
    if facts.open_modes:
        return Diagnosis(
            "modes", FAIL, f"open to other users: {_format_some(facts.open_modes)}", f"chmod -R go-rwx {facts.home}"
        )
    return Diagnosis("modes", OK, "file permissions ok")


def check_lock(facts: Facts) -> Diagnosis:
    if facts.lock_holder and facts.status is None:
        return Diagnosis(
            "lock",
            FAIL,
            f"process {facts.lock_holder} holds the home, and no proxy answers",
            f"see what it is (ps -p {facts.lock_holder}), and end it if it hangs",
        )
    return Diagnosis(
        "lock", OK, f"process {facts.lock_holder} holds the home" if facts.lock_holder else "nobody holds it"
    )


def check_proxy(facts: Facts) -> Diagnosis:
    if facts.status is not None:
        return Diagnosis("proxy", OK, f"runs at {facts.proxy_url}")
    return Diagnosis("proxy", WARN, facts.proxy_error, "start it: warmline serve")


def check_run_files(facts: Facts) -> Diagnosis:
    if facts.run_files:
        told = [f"{name} names process {pid}, which is gone" for name, pid in facts.run_files.items()]
        return Diagnosis(
            "run files", WARN, _format_some(told), "it was killed: `warmline serve` starts it anew and clears up"
        )
    return Diagnosis("run files", OK, "none is stale")


def check_backend(facts: Facts) -> Diagnosis | None:
    if facts.status is None:
        return None
    if why := facts.status["backend"]:
        return Diagnosis("backend", FAIL, why, "see its log; `warmline doctor` examines the model")
    engine = facts.status["engine"]
    if engine and engine.get("failure"):
        return Diagnosis("backend", FAIL, engine["failure"], "see its log; `warmline doctor` examines the model")
    return Diagnosis("backend", OK, f"serves {engine['model']}" if engine else "answers")


def check_ports(facts: Facts) -> Diagnosis | None:
    if facts.status is not None:
        return None
    if facts.ports_taken:
        told = " and ".join(map(str, facts.ports_taken))
        return Diagnosis(
            "ports", FAIL, f"{told} taken by another program", "end it, or choose others: --port, --backend-port"
        )
    return Diagnosis("ports", OK, f"{facts.settings.port} and {facts.settings.backend_port} are free")


def check_disk(facts: Facts) -> Diagnosis:
    machine, budget = facts.machine, _disk_budget_bytes(facts)
    used = _disk_used_bytes(facts)
    free = f"{format_size(machine.disk_bytes_free)} free of {format_size(machine.disk_bytes)}"
    if machine.disk_bytes_free < max(DISK_FREE_BYTES_MIN, machine.disk_bytes * DISK_FREE_SHARE_MIN):
        return Diagnosis(
            "disk", FAIL, f"nearly full: {free}", "make room: cachectl gc --to-gb N, or delete other files"
        )
    if budget > used + machine.disk_bytes_free:
        told = f"the budget of {format_size(budget)} is more than there is: {free}, {format_size(used)} used"
        return Diagnosis("disk", WARN, told, "lower disk_budget_gb, or make room")
    return Diagnosis("disk", OK, f"{format_size(used)} of the budget of {format_size(budget)} used; {free}")


def check_persistence(facts: Facts) -> Diagnosis | None:
    if facts.status is None:
        return None
    state = facts.status["persistence"]
    if state != "ok":
        return Diagnosis(
            "saving", FAIL, f"what is computed can't be saved: {state}", "docs/resilience.md tells what helps"
        )
    return Diagnosis("saving", OK, "works")


def check_index(facts: Facts) -> Diagnosis:
    found = facts.index
    if found.problem.startswith("no index"):
        return Diagnosis("index", OK, "nothing was ever stored")
    if found.problem:
        return Diagnosis("index", FAIL, found.problem, "cachectl verify --repair")
    if found.findings:
        told = ", ".join(f"{what} {number}" for what, number in Counter(each.what for each in found.findings).items())
        return Diagnosis(
            "index", FAIL, f"{format_count(len(found.findings), 'finding')}: {told}", "cachectl verify --repair"
        )
    return Diagnosis("index", OK, f"{format_count(found.totals.segments if found.totals else 0, 'segment')}, all ok")


def check_quarantine(facts: Facts) -> Diagnosis | None:
    totals = facts.index.totals
    if totals is None:
        return None
    if totals.quarantined:
        told = f"{format_count(totals.quarantined, 'file')}, {format_size(totals.bytes_quarantined)}"
        return Diagnosis("quarantine", WARN, told, "cachectl inspect says why; eviction takes them first")
    return Diagnosis("quarantine", OK, "empty")


def check_reuse(facts: Facts) -> Diagnosis:
    if facts.settings.reuse == "off":
        return Diagnosis("reuse", WARN, "it is off: every prompt is computed anew", "reuse = fast, or exact")
    return Diagnosis("reuse", OK, facts.settings.reuse)


def check_hit_rate(facts: Facts) -> Diagnosis:
    records = [record for record in facts.index.records if record.prompt_tokens]
    prompt, cached = (sum(getattr(each, name) for each in records) for name in ("prompt_tokens", "cached_tokens"))
    share = cached / prompt if prompt else 0.0
    told = f"{share:.0%} of the prompts of the last {format_count(len(records), 'request')} reused"
    if len(records) < HIT_REQUESTS_MIN or share >= HIT_SHARE_MIN:
        return Diagnosis("hit rate", OK, told)
    why, mend = _find_commonest_miss(records)
    return Diagnosis("hit rate", WARN, f"{told}; most often: {why}" if why else told, mend)


def _find_commonest_miss(records: list[RequestRecord]) -> tuple[str, str]:
    """(reason, remedy) of the misses that cost the most tokens."""
    causes: Counter[str] = Counter()
    for record in records:
        missed = record.prompt_tokens - record.cached_tokens
        if record.parting and record.parting.cause in CAUSES:
            causes[record.parting.cause] += missed
        elif record.why_not_warmer:
            causes[normalize_reason(record)] += missed
    if not causes:
        return "", "cachectl stats has the reasons"
    ((cause, _),) = causes.most_common(1)
    if cause in CAUSES:
        return CAUSES[cause].meaning, CAUSES[cause].advice or "cachectl explain shows where"
    return cause, "cachectl explain shows where"


def check_fingerprint(facts: Facts) -> Diagnosis | None:
    """Several namespaces of one model that keys don't account for: its weights, config or code have changed."""
    holders = 1 + facts.keys + facts.settings.key_in_settings
    several = {model: roots for model, roots in facts.index.roots.items() if roots > holders}
    if facts.index.totals is None:
        return None
    if several:
        told = [f"{model} is stored under {roots} identities" for model, roots in several.items()]
        return Diagnosis(
            "fingerprint",
            WARN,
            f"{_format_some(told)}: its files, its keys, or in exact mode the libraries, have changed",
            "what is old is evicted in time; at once: cachectl purge --older-than 7d",
        )
    return Diagnosis("fingerprint", OK, "nothing is stored of models as they were before")


def check_keys(facts: Facts) -> Diagnosis:
    if facts.keys_problem:
        return Diagnosis("keys", FAIL, facts.keys_problem, "cachectl key list; restore the file, or make keys anew")
    known = facts.keys + facts.settings.key_in_settings
    if facts.settings.on_loopback:
        return Diagnosis("keys", OK, f"{format_count(known, 'client key')}, and only this machine can connect")
    if not known and not facts.settings.lan:
        told = f"host {facts.settings.host} lets other machines connect, and there is no client key"
        return Diagnosis("keys", FAIL, told, "use --lan, which makes one, or cachectl key add NAME")
    return Diagnosis(
        "keys", OK, f"{format_count(known, 'client key')}; plain HTTP: in a network that you trust, or behind TLS"
    )


def check_allowed_hosts(facts: Facts) -> Diagnosis | None:
    if "*" in facts.settings.allowed_hosts.split(","):
        told = "any name may be in Host: a web page can have a browser here ask this server"
        return Diagnosis("allowed_hosts", WARN, told, "name the names: allowed_hosts = my-mac.example")
    return None


def check_clock(facts: Facts) -> Diagnosis | None:
    latest = max((record.at for record in facts.index.records), default=0.0)
    if latest > facts.machine.now + CLOCK_SLACK_S:
        ahead = format_duration(latest - facts.machine.now)
        return Diagnosis(
            "clock", WARN, f"records lie {ahead} in the future", "set the clock; ages are wrong until then"
        )
    return Diagnosis("clock", OK, "records lie in the past")


def check_logs(facts: Facts) -> Diagnosis:
    if facts.log_bytes > LOG_BYTES_MAX:
        return Diagnosis(
            "logs", WARN, f"{format_size(facts.log_bytes)} in {facts.home / 'logs'}", "delete the old ones"
        )
    return Diagnosis("logs", OK, format_size(facts.log_bytes))


def check_descriptors(facts: Facts) -> Diagnosis:
    soft, hard = facts.machine.descriptors_soft, facts.machine.descriptors_hard
    most = max(soft, hard) if min(soft, hard) >= 0 else DESCRIPTORS_MIN  # -1: no limit
    if most < DESCRIPTORS_MIN:
        return Diagnosis("descriptors", WARN, f"at most {most} files may be open", f"ulimit -n {2 * DESCRIPTORS_MIN}")
    return Diagnosis("descriptors", OK, "no limit" if soft < 0 else f"{soft:,}, raised at a start where it must be")


def check_memory(facts: Facts) -> Diagnosis | None:
    engine = facts.status["engine"] if facts.status else None
    if not engine:
        return None
    budget, there = engine["memory_budget_bytes"], facts.machine.memory_bytes
    told = f"{format_size(budget)} for conversations, of the machine's {format_size(there)}"
    if budget > there * MEMORY_SHARE_MAX and not facts.machine.has_gpu:
        return Diagnosis("memory", WARN, told, "lower memory_budget_gb, or leave it 0: as the machine allows")
    return Diagnosis("memory", OK, told)


def check_wired_limit(facts: Facts) -> Diagnosis | None:
    """macOS lets the GPU have some three quarters of the memory, unless told otherwise."""
    limit = facts.machine.wired_limit_mb.strip()
    if facts.machine.system != "darwin" or not limit.isdigit():
        return None
    if int(limit):
        return Diagnosis("wired limit", OK, f"the GPU may have {format_size(int(limit) * 1 << 20)}")
    return Diagnosis("wired limit", OK, "the system's own; a model that needs more: sudo sysctl iogpu.wired_limit_mb=N")


def check_sleep(facts: Facts) -> Diagnosis | None:
    found = re.search(r"^\s*sleep\s+(\d+)", facts.machine.power, flags=re.MULTILINE)
    if facts.machine.system != "darwin" or found is None:
        return None
    if int(found[1]):
        told = f"this machine sleeps after {format_count(int(found[1]), 'minute')} of nobody using it"
        return Diagnosis("sleep", WARN, told, "sudo pmset -c sleep 0, or run it under caffeinate -s")
    return Diagnosis("sleep", OK, "it stays awake")


def check_launchd(facts: Facts) -> Diagnosis | None:
    """Lines of `launchctl list`: pid or "-", last exit status, label."""
    lines = [line.split(None, 2) for line in facts.machine.agents.splitlines() if "warmline" in line]
    if not lines:
        return None
    failing = [label for pid, code, label in lines if pid == "-" and code not in ("0", "-")]
    if failing:
        return Diagnosis("launchd", FAIL, f"loaded, but failing: {_format_some(failing)}", "warmline launchd logs")
    return Diagnosis("launchd", OK, f"{format_count(len(lines), 'agent')} loaded")


def check_blas(facts: Facts) -> Diagnosis | None:
    if facts.machine.system != "linux" or facts.machine.has_gpu:
        return None
    if not facts.machine.has_openblas:
        told = "no OpenBLAS found: prefill on this CPU is about ten times slower than it could be"
        return Diagnosis("BLAS", WARN, told, "on Debian or Ubuntu: sudo apt-get install libopenblas0-pthread")
    return Diagnosis("BLAS", OK, "OpenBLAS is there")


CHECKS: tuple[Callable[[Facts], Diagnosis | None], ...] = (
    *(check_home, check_modes, check_lock, check_proxy, check_run_files, check_backend, check_ports, check_persistence),
    *(check_disk, check_index, check_quarantine, check_reuse, check_hit_rate, check_fingerprint),
    *(
        check_keys,
        check_allowed_hosts,
        check_clock,
        check_logs,
        check_descriptors,
        check_memory,
        check_wired_limit,
        check_sleep,
        check_launchd,
        check_blas,
    ),
)


def run_checks(facts: Facts) -> list[Diagnosis]:
    """All that apply, in their order; without a home the first alone."""
    if not facts.has_home:
        return [check_home(facts)]
    return [found for check in CHECKS if (found := check(facts)) is not None]


def _disk_budget_bytes(facts: Facts) -> int:
    return int(facts.status["disk_budget_bytes"]) if facts.status else facts.settings.disk_budget_bytes


def _disk_used_bytes(facts: Facts) -> int:
    if facts.status:
        return bytes_used(facts.status["totals"])
    return facts.index.totals.bytes_used if facts.index.totals else 0


def _format_some(items: list[str]) -> str:
    more = len(items) - SHOWN_MAX
    return "; ".join(items[:SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")
