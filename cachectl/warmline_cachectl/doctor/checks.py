"""`cachectl doctor`'s judgement: what commonly goes wrong, how it is seen, and its mend.  Pure functions over facts."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from warmline_cachectl.doctor.facts import Facts
from warmline_cachectl.views.tables import count, size, span
from warmline_cachectl.views.top import bytes_used
from warmline_cachectl.views.values import reason
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
class Check:
    name: str
    status: Status
    seen: str
    mend: str = ""  # what to do; "" where there is nothing to do


def home(facts: Facts) -> Check:
    if not facts.has_home:
        return Check(
            "home", FAIL, f"no home at {facts.home}", "name one with --home or WARMLINE_HOME, or `warmline serve`"
        )
    return Check("home", OK, str(facts.home))


def modes(facts: Facts) -> Check:
    if facts.open_modes:
        return Check("modes", FAIL, f"open to other users: {_some(facts.open_modes)}", f"chmod -R go-rwx {facts.home}")
    return Check("modes", OK, "files are their owner's alone")


def lock(facts: Facts) -> Check:
    if facts.lock_holder and facts.status is None:
        return Check(
            "lock",
            FAIL,
            f"process {facts.lock_holder} holds the home, and no proxy answers",
            f"see what it is (ps -p {facts.lock_holder}), and end it if it hangs",
        )
    return Check("lock", OK, f"process {facts.lock_holder} holds the home" if facts.lock_holder else "nobody holds it")


def proxy(facts: Facts) -> Check:
    if facts.status is not None:
        return Check("proxy", OK, f"runs at {facts.proxy_url}")
    return Check("proxy", WARN, facts.proxy_error, "start it: warmline serve")


def run_files(facts: Facts) -> Check:
    if facts.run_files:
        told = [f"{name} names process {pid}, which is gone" for name, pid in facts.run_files.items()]
        return Check("run files", WARN, _some(told), "it was killed: `warmline serve` starts it anew and clears up")
    return Check("run files", OK, "none is stale")


def backend(facts: Facts) -> Check | None:
    if facts.status is None:
        return None
    if why := facts.status["backend"]:
        return Check("backend", FAIL, why, "see its log; `warmline doctor` examines the model")
    engine = facts.status["engine"]
    if engine and engine.get("failure"):
        return Check("backend", FAIL, engine["failure"], "see its log; `warmline doctor` examines the model")
    return Check("backend", OK, f"serves {engine['model']}" if engine else "answers")


def ports(facts: Facts) -> Check | None:
    if facts.status is not None:
        return None
    if facts.ports_taken:
        told = " and ".join(map(str, facts.ports_taken))
        return Check(
            "ports", FAIL, f"{told} taken by another program", "end it, or choose others: --port, --backend-port"
        )
    return Check("ports", OK, f"{facts.settings.port} and {facts.settings.backend_port} are free")


def disk(facts: Facts) -> Check:
    machine, budget = facts.machine, _budget(facts)
    used = _used(facts)
    free = f"{size(machine.disk_bytes_free)} free of {size(machine.disk_bytes)}"
    if machine.disk_bytes_free < max(DISK_FREE_BYTES_MIN, machine.disk_bytes * DISK_FREE_SHARE_MIN):
        return Check("disk", FAIL, f"nearly full: {free}", "make room: cachectl gc --to-gb N, or delete other files")
    if budget > used + machine.disk_bytes_free:
        told = f"the budget of {size(budget)} is more than there is: {free}, {size(used)} used"
        return Check("disk", WARN, told, "lower disk_budget_gb, or make room")
    return Check("disk", OK, f"{size(used)} of the budget of {size(budget)} used; {free}")


def persistence(facts: Facts) -> Check | None:
    if facts.status is None:
        return None
    state = facts.status["persistence"]
    if state != "ok":
        return Check("saving", FAIL, f"what is computed can't be saved: {state}", "docs/resilience.md tells what helps")
    return Check("saving", OK, "works")


def index(facts: Facts) -> Check:
    found = facts.index
    if found.problem.startswith("no index"):
        return Check("index", OK, "nothing was ever stored")
    if found.problem:
        return Check("index", FAIL, found.problem, "cachectl verify --repair")
    if found.findings:
        told = ", ".join(f"{what} {number}" for what, number in Counter(each.what for each in found.findings).items())
        return Check("index", FAIL, f"{count(len(found.findings), 'finding')}: {told}", "cachectl verify --repair")
    return Check("index", OK, f"{count(found.totals.segments if found.totals else 0, 'segment')}, all in order")


def quarantine(facts: Facts) -> Check | None:
    totals = facts.index.totals
    if totals is None:
        return None
    if totals.quarantined:
        told = f"{count(totals.quarantined, 'file')}, {size(totals.bytes_quarantined)}"
        return Check("quarantine", WARN, told, "cachectl inspect says why; eviction takes them first")
    return Check("quarantine", OK, "empty")


def reuse(facts: Facts) -> Check:
    if facts.settings.reuse == "off":
        return Check("reuse", WARN, "it is off: every prompt is computed anew", "reuse = fast, or exact")
    return Check("reuse", OK, facts.settings.reuse)


def hit_rate(facts: Facts) -> Check:
    records = [record for record in facts.index.records if record.prompt_tokens]
    prompt, cached = (sum(getattr(each, name) for each in records) for name in ("prompt_tokens", "cached_tokens"))
    share = cached / prompt if prompt else 0.0
    told = f"{share:.0%} of the prompts of the last {count(len(records), 'request')} reused"
    if len(records) < HIT_REQUESTS_MIN or share >= HIT_SHARE_MIN:
        return Check("hit rate", OK, told)
    why, mend = _commonest_miss(records)
    return Check("hit rate", WARN, f"{told}; most often: {why}" if why else told, mend)


def _commonest_miss(records: list[RequestRecord]) -> tuple[str, str]:
    """What costs the most tokens, and what helps."""
    causes: Counter[str] = Counter()
    for record in records:
        missed = record.prompt_tokens - record.cached_tokens
        if record.parting and record.parting.cause in CAUSES:
            causes[record.parting.cause] += missed
        elif record.why_not_warmer:
            causes[reason(record)] += missed
    if not causes:
        return "", "cachectl stats has the reasons"
    ((cause, _),) = causes.most_common(1)
    if cause in CAUSES:
        return CAUSES[cause].means, CAUSES[cause].advice or "cachectl explain shows where"
    return cause, "cachectl explain shows where"


def fingerprint(facts: Facts) -> Check | None:
    """Several namespaces of one model that keys don't account for: its weights, config or code have changed."""
    holders = 1 + facts.keys + facts.settings.key_in_settings
    several = {model: roots for model, roots in facts.index.roots.items() if roots > holders}
    if facts.index.totals is None:
        return None
    if several:
        told = [f"{model} is stored under {roots} identities" for model, roots in several.items()]
        return Check(
            "fingerprint",
            WARN,
            f"{_some(told)}: its files, its keys, or in exact mode the libraries, have changed",
            "what is old is evicted in time; at once: cachectl purge --older-than 7d",
        )
    return Check("fingerprint", OK, "nothing is stored of models as they were before")


def keys(facts: Facts) -> Check:
    if facts.keys_problem:
        return Check("keys", FAIL, facts.keys_problem, "cachectl key list; restore the file, or make keys anew")
    known = facts.keys + facts.settings.key_in_settings
    if facts.settings.on_loopback:
        return Check("keys", OK, f"{count(known, 'client key')}, and only this machine can connect")
    if not known and not facts.settings.lan:
        told = f"host {facts.settings.host} lets other machines connect, and there is no client key"
        return Check("keys", FAIL, told, "use --lan, which makes one, or cachectl key add NAME")
    return Check("keys", OK, f"{count(known, 'client key')}; plain HTTP: in a network that you trust, or behind TLS")


def hosts(facts: Facts) -> Check | None:
    if "*" in facts.settings.allowed_hosts.split(","):
        told = "any name may be in Host: a web page can have a browser here ask this server"
        return Check("allowed_hosts", WARN, told, "name the names: allowed_hosts = my-mac.example")
    return None


def clock(facts: Facts) -> Check | None:
    latest = max((record.at for record in facts.index.records), default=0.0)
    if latest > facts.machine.now + CLOCK_SLACK_S:
        ahead = span(latest - facts.machine.now)
        return Check("clock", WARN, f"records lie {ahead} in the future", "set the clock; ages are wrong until then")
    return Check("clock", OK, "records lie in the past")


def logs(facts: Facts) -> Check:
    if facts.log_bytes > LOG_BYTES_MAX:
        return Check("logs", WARN, f"{size(facts.log_bytes)} in {facts.home / 'logs'}", "delete the old ones")
    return Check("logs", OK, size(facts.log_bytes))


def descriptors(facts: Facts) -> Check:
    soft, hard = facts.machine.descriptors_soft, facts.machine.descriptors_hard
    most = max(soft, hard) if min(soft, hard) >= 0 else DESCRIPTORS_MIN  # -1: no limit
    if most < DESCRIPTORS_MIN:
        return Check("descriptors", WARN, f"at most {most} files may be open", f"ulimit -n {2 * DESCRIPTORS_MIN}")
    return Check("descriptors", OK, "no limit" if soft < 0 else f"{soft:,}, raised at a start where it must be")


def memory(facts: Facts) -> Check | None:
    engine = facts.status["engine"] if facts.status else None
    if not engine:
        return None
    budget, there = engine["memory_budget_bytes"], facts.machine.memory_bytes
    told = f"{size(budget)} for conversations, of the machine's {size(there)}"
    if budget > there * MEMORY_SHARE_MAX and not facts.machine.has_gpu:
        return Check("memory", WARN, told, "lower memory_budget_gb, or leave it 0: as the machine allows")
    return Check("memory", OK, told)


def wired_limit(facts: Facts) -> Check | None:
    """macOS lets the GPU have some three quarters of the memory, unless told otherwise."""
    limit = facts.machine.wired_limit_mb.strip()
    if facts.machine.system != "darwin" or not limit.isdigit():
        return None
    if int(limit):
        return Check("wired limit", OK, f"the GPU may have {size(int(limit) * 1 << 20)}")
    return Check("wired limit", OK, "the system's own; a model that needs more: sudo sysctl iogpu.wired_limit_mb=N")


def sleep(facts: Facts) -> Check | None:
    found = re.search(r"^\s*sleep\s+(\d+)", facts.machine.power, flags=re.MULTILINE)
    if facts.machine.system != "darwin" or found is None:
        return None
    if int(found[1]):
        told = f"this machine sleeps after {count(int(found[1]), 'minute')} of nobody using it"
        return Check("sleep", WARN, told, "sudo pmset -c sleep 0, or run it under caffeinate -s")
    return Check("sleep", OK, "it stays awake")


def agents(facts: Facts) -> Check | None:
    """Lines of `launchctl list`: pid or "-", last exit status, label."""
    lines = [line.split(None, 2) for line in facts.machine.agents.splitlines() if "warmline" in line]
    if not lines:
        return None
    failing = [label for pid, code, label in lines if pid == "-" and code not in ("0", "-")]
    if failing:
        return Check("launchd", FAIL, f"loaded, but failing: {_some(failing)}", "warmline launchd logs")
    return Check("launchd", OK, f"{count(len(lines), 'agent')} loaded")


def blas(facts: Facts) -> Check | None:
    if facts.machine.system != "linux" or facts.machine.has_gpu:
        return None
    if not facts.machine.has_openblas:
        told = "no OpenBLAS found: prefill on this CPU is about ten times slower than it could be"
        return Check("BLAS", WARN, told, "on Debian or Ubuntu: sudo apt-get install libopenblas0-pthread")
    return Check("BLAS", OK, "OpenBLAS is there")


CHECKS: tuple[Callable[[Facts], Check | None], ...] = (
    *(home, modes, lock, proxy, run_files, backend, ports, persistence),
    *(disk, index, quarantine, reuse, hit_rate, fingerprint),
    *(keys, hosts, clock, logs, descriptors, memory, wired_limit, sleep, agents, blas),
)


def examine(facts: Facts) -> list[Check]:
    """All that apply, in their order; without a home the first alone."""
    if not facts.has_home:
        return [home(facts)]
    return [found for check in CHECKS if (found := check(facts)) is not None]


def _budget(facts: Facts) -> int:
    return int(facts.status["disk_budget_bytes"]) if facts.status else facts.settings.disk_budget_bytes


def _used(facts: Facts) -> int:
    if facts.status:
        return bytes_used(facts.status["totals"])
    return facts.index.totals.bytes_used if facts.index.totals else 0


def _some(told: list[str]) -> str:
    more = len(told) - SHOWN_MAX
    return "; ".join(told[:SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")
