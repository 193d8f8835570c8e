"""All checks in their order: each needs what those before it found to be right."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_backend.doctor import activations as work
from warmline_backend.doctor import chat_template as template
from warmline_backend.doctor import locations as places
from warmline_backend.doctor import machines, memory
from warmline_backend.doctor.config import check_configuration, own_code
from warmline_backend.doctor.files import CONFIG, check_files
from warmline_backend.doctor.findings import Finding, Findings, Level, worst
from warmline_backend.doctor.kv_cache import Cache, check_cache
from warmline_backend.doctor.sample_prompt import Question
from warmline_backend.doctor.serving import serve_line
from warmline_backend.doctor.weights import Assembled, check_parameters
from warmline_backend.model.loader import ModelProblem, read_config
from warmline_backend.model.model import context_tokens_max
from warmline_common.process.arguments import GB

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
AREAS = ("files", "config", "parameters", "cache", "memory", "tokenizer", "template")  # as they are shown
DAMAGED = "download what is named here again; if that changes nothing, this is a fault of warmline doctor"


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
    """Reads file headers, config and tokenizer; no weight.  What a check does not expect is a finding, too."""
    looked = _Looked(question)
    try:
        looked.at_all()
    except Exception as error:  # noqa: BLE001  a broken model may raise anything anywhere, and who asks wants to know where
        where, area = looked.where
        failed = Findings(area)
        failed.fail(f"{where} can't be examined: {type(error).__name__}: {error}", DAMAGED)
        looked.found += failed
    findings = tuple(sorted(looked.found, key=lambda finding: AREAS.index(finding.area)))
    return Examination(question, looked.folder, findings, looked.weights, looked.cache, looked.plan)


class _Looked:
    """What has been looked at so far; `where` says what is being looked at, and whose area that is."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.where = (question.model, "files")
        self.found: list[Finding] = []
        self.folder: Path | None = None
        self.weights: Assembled | None = None
        self.cache: Cache | None = None
        self.plan: memory.Plan | None = None

    def at_all(self) -> None:
        found, self.folder = places.find(self.question.model)
        self.found += found
        if self.folder is None:
            return
        config = self._files(self.folder)
        if config:
            self._tokenizer(self.folder, config)
            if not self._failed("files", "config") and self._may_run(config):
                self._weights(self.folder)

    def _files(self, folder: Path) -> dict[str, Any]:
        """The config; empty where it is not known."""
        self.where = (str(folder), "files")
        files = check_files(folder)
        self.found += files.findings
        self.where = (f"--adapter-path {self.question.adapter_path}", "files")
        self.found += _adapter(self.question.adapter_path)
        if not files.config:
            return {}
        self.where = (str(folder / CONFIG), "config")
        try:
            config = read_config(folder)
        except ModelProblem as problem:
            failed = Findings("config")
            failed.fail(str(problem))
            self.found += failed
            return {}
        self.found += check_configuration(config, None if self._failed("files") else files.tensor_names)
        return config

    def _tokenizer(self, folder: Path, config: dict[str, Any]) -> None:
        self.where = (f"{folder / 'tokenizer.json'}, or tokenizer_config.json,", "tokenizer")
        findings, tokenizer = template.load(folder, config, trust_remote_code=self.question.trust_remote_code)
        self.found += findings
        if tokenizer is None:
            return
        self.where = (f"the chat template in {folder}", "template")
        self.found += template.check_template(tokenizer, config, json.loads(self.question.chat_template_args))

    def _weights(self, folder: Path) -> None:
        self.where = (f"the model in {folder}", "parameters")
        parameters, self.weights = check_parameters(folder, trust_remote_code=self.question.trust_remote_code)
        self.found += parameters
        if self.weights is None:
            return
        self.where = (f"the cache of the model in {folder}", "cache")
        checked, self.cache = check_cache(self.weights.model, self.question)
        self.found += checked
        if self.cache is None:
            return
        self.where = (f"what a step of the model in {folder} takes", "memory")
        needs = _needs(self.weights, self.cache, self.question)
        self.found += self._memory(needs)

    def _memory(self, needs: memory.Needs) -> Findings:
        question = self.question
        machine = machines.mac_of(question.memory_gb) if question.memory_gb else machines.this_machine()
        speeds = memory.Speeds(question.prefill_tokens_s, question.disk_gb_s * GB)
        self.plan = memory.plan(needs, machine, int(question.memory_budget_gb * GB), speeds)
        return memory.check_memory(needs, self.plan)

    def _failed(self, *areas: str) -> bool:
        return any(finding.level is Level.FAIL and finding.area in areas for finding in self.found)

    def _may_run(self, config: Mapping[str, Any]) -> bool:
        """Whether the model can be built; not by code that comes with it, unless that is trusted."""
        if not own_code(dict(config)) or self.question.trust_remote_code:
            return True
        unseen = Findings("parameters")
        unseen.fail(
            "not examined: that would run the model's own code",
            "read it, and ask again with --trust-remote-code if you trust it",
        )
        self.found += unseen
        return False


def _adapter(path: str) -> Findings:
    findings = Findings("files")
    for name in ADAPTER_FILES if path else ():
        if not (Path(path) / name).is_file():
            findings.fail(f"the adapter's folder {path} has no {name}", "give the folder that mlx_lm.lora has written")
    return findings


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
