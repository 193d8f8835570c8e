"""All checks in their order: each needs what those before it found to be right."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_backend.doctor import machines, memory, places, template, work
from warmline_backend.doctor.cache import Cache, check_cache
from warmline_backend.doctor.configuration import check_configuration, own_code
from warmline_backend.doctor.files import check_files
from warmline_backend.doctor.findings import Finding, Findings, Level, worst
from warmline_backend.doctor.parameters import Assembled, check_parameters
from warmline_backend.doctor.question import Question
from warmline_backend.doctor.serving import serve_line
from warmline_backend.model import context_tokens_max
from warmline_wire.flags import GB

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


@dataclass(frozen=True)
class Examination:
    """What was found.  Parts are None where what comes before them is wrong."""

    question: Question
    folder: Path | None
    findings: tuple[Finding, ...]
    weights: Assembled | None = None
    cache: Cache | None = None
    plan: memory.Plan | None = None

    @property
    def verdict(self) -> Level:
        return worst(self.findings)

    @property
    def serve(self) -> str:
        """The command that serves the model; "" where something is wrong."""
        if self.verdict is Level.FAIL or self.weights is None:
            return ""
        wanted = self.plan.budget_wanted_gb if self.plan else 0.0
        return serve_line(self.question, own_code=bool(own_code(self.weights.config)), budget_wanted_gb=wanted)


def examine(question: Question) -> Examination:
    """Reads file headers, config and tokenizer; no weight."""
    found, folder = places.find(question.model)
    if folder is None:
        return Examination(question, None, tuple(found))
    files = check_files(folder)
    found += files.findings
    found += _adapter(question.adapter_path)
    if files.config:
        found += check_configuration(files.config, files.tensor_names)
        found += _tokenizer(folder, files.config, question)
    if _failed(found, "files", "config") or not _may_run(files.config, question, found):
        return Examination(question, folder, _sorted(found))
    parameters, weights = check_parameters(folder, trust_remote_code=question.trust_remote_code)
    found += parameters
    if weights is None:
        return Examination(question, folder, _sorted(found))
    checked, cache = check_cache(weights.model, question)
    found += checked
    if cache is None:
        return Examination(question, folder, _sorted(found), weights)
    needs = _needs(weights, cache, question)
    machine = machines.mac_of(question.memory_gb) if question.memory_gb else machines.this_machine()
    speeds = memory.Speeds(question.prefill_tokens_s, question.disk_gb_s * GB)
    planned = memory.plan(needs, machine, int(question.memory_budget_gb * GB), speeds)
    found += memory.check_memory(needs, planned)
    return Examination(question, folder, _sorted(found), weights, cache, planned)


AREAS = ("files", "config", "parameters", "cache", "memory", "tokenizer", "template")


def _sorted(found: Findings) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: AREAS.index(finding.area)))


def _failed(found: Findings, *areas: str) -> bool:
    return any(finding.level is Level.FAIL and finding.area in areas for finding in found)


def _may_run(config: Mapping[str, Any], question: Question, found: Findings) -> bool:
    """Whether the model can be built; not by code that comes with it, unless that is trusted."""
    if not own_code(dict(config)) or question.trust_remote_code:
        return True
    unseen = Findings("parameters")
    unseen.fail(
        "not examined: that would run the model's own code",
        "read it, and ask again with --trust-remote-code if you trust it",
    )
    found += unseen
    return False


def _adapter(path: str) -> Findings:
    findings = Findings("files")
    for name in ADAPTER_FILES if path else ():
        if not (Path(path) / name).is_file():
            findings.fail(f"the adapter's folder {path} has no {name}", "give the folder that mlx_lm.lora has written")
    return findings


def _tokenizer(folder: Path, config: dict[str, Any], question: Question) -> Findings:
    findings, tokenizer = template.load(folder, config, trust_remote_code=question.trust_remote_code)
    if tokenizer is None:
        return findings
    return Findings(
        "tokenizer",
        [*findings, *template.check_template(tokenizer, config, json.loads(question.chat_template_args))],
    )


def _needs(weights: Assembled, cache: Cache, question: Question) -> memory.Needs:
    context = context_tokens_max(weights.config)
    step_bytes = _step_bytes(weights, cache, question.step_tokens, context)
    weight = cache.weight
    return memory.Needs(weights.weight_bytes, weight.row_bytes, weight.state_bytes, context, step_bytes)


def _step_bytes(weights: Assembled, cache: Cache, step: int, context: int) -> Callable[[int], int]:
    """What a step takes, by the graphs of two: what lies between and beyond them is on a line, nearly."""
    deepest = min(memory.LENGTHS[-1], context or memory.LENGTHS[-1])
    shallow, deep = min(memory.LENGTHS[0], deepest // 2), deepest
    step = min(step, context or step)
    work.hollow(weights.model)
    heads = _heads(weights.config)
    low, high = (work.step_bytes(weights.model, cache.layout, heads, depth, step) for depth in (shallow, deep))
    return lambda tokens: max(low, low + (high - low) * (tokens - shallow) // max(1, deep - shallow))


def _heads(config: Mapping[str, Any]) -> int:
    """Of the layer that has most; 1 where the config doesn't say."""
    said = (config.get("text_config") or config).get("num_attention_heads")
    return max([count for count in (said if isinstance(said, list) else [said]) if isinstance(count, int)], default=1)
