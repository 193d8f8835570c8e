"""Sequence of all checks: each needs what the checks before it found to be right."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_backend.doctor import chat_template, estimates, files, memory
from warmline_backend.doctor.checkpoint import LazyModel, check_config, check_weights, find_custom_code
from warmline_backend.doctor.estimates import CacheSummary, check_cache
from warmline_backend.doctor.files import CONFIG_NAME, check_files
from warmline_backend.doctor.findings import DoctorFinding, FindingLevel, Findings, find_worst_level
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.model.loader import ModelError, read_config
from warmline_backend.model.model import find_context_tokens_max
from warmline_common.process.arguments import GB


def format_serve_command(settings: DoctorSettings, *, has_custom_code: bool, budget_needed_gb: float) -> str:
    """Shell command that serves the model with the given settings and what the model needs besides."""
    usual = DoctorSettings(settings.model)
    budget = budget_needed_gb or settings.memory_budget_gb
    options: list[tuple[str, object, bool]] = [  # with whether to say it
        ("--model", settings.called or settings.model, True),
        ("--home", settings.home, bool(settings.home)),
        ("--memory-budget-gb", f"{budget:g}", budget > 0),
        ("--prefill-step-size", settings.prefill_step_size, settings.prefill_step_size != usual.prefill_step_size),
        ("--kv-bits", settings.kv_bits, settings.kv_bits > 0),
        ("--kv-group-size", settings.kv_group_size, settings.kv_bits > 0),
        ("--chat-template-args", settings.chat_template_args, settings.chat_template_args != usual.chat_template_args),
        ("--adapter-path", settings.adapter_path, bool(settings.adapter_path)),
    ]
    words = ["warmline", "serve"]
    for flag, value, said in options:
        if said:
            words += [flag, str(value)]
    if has_custom_code or settings.trust_remote_code:
        words.append("--trust-remote-code")
    return shlex.join(words)


ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
AREAS = ("files", "config", "parameters", "cache", "memory", "tokenizer", "template")  # as they are shown
DAMAGED = "download what is named here again; if that changes nothing, this is a fault of warmline doctor"


@dataclass(frozen=True)
class Examination:
    """Results of all checks.  Parts are None where an earlier check failed."""

    settings: DoctorSettings
    folder: Path | None
    findings: tuple[DoctorFinding, ...]
    weights: LazyModel | None = None
    cache: CacheSummary | None = None
    plan: memory.MemoryPlan | None = None

    @property
    def verdict(self) -> FindingLevel:
        return find_worst_level(self.findings)

    @property
    def serve_command(self) -> str:
        """Command that serves the model; "" where a check failed."""
        if self.verdict is FindingLevel.FAIL or self.weights is None:
            return ""
        wanted = self.plan.budget_needed_gb if self.plan else 0.0
        return format_serve_command(
            self.settings, has_custom_code=bool(find_custom_code(self.weights.config)), budget_needed_gb=wanted
        )


def examine_model(settings: DoctorSettings) -> Examination:
    """Run all checks on a model: file headers, config and tokenizer, no weights.  An unexpected error is a finding,
    too.
    """
    looked = _Examiner(settings)
    try:
        looked.run()
    except Exception as error:  # noqa: BLE001  a broken model may raise anything anywhere, and who asks wants to know where
        where, area = looked.current_check
        failed = Findings(area)
        failed.fail(f"{where} can't be examined: {type(error).__name__}: {error}", DAMAGED)
        looked.found += failed
    findings = tuple(sorted(looked.found, key=lambda finding: AREAS.index(finding.area)))
    return Examination(settings, looked.folder, findings, looked.weights, looked.cache, looked.plan)


class _Examiner:
    """State of a run of checks; `area` names the check under way."""

    def __init__(self, settings: DoctorSettings) -> None:
        self.question = settings
        self.current_check = (settings.model, "files")
        self.found: list[DoctorFinding] = []
        self.folder: Path | None = None
        self.weights: LazyModel | None = None
        self.cache: CacheSummary | None = None
        self.plan: memory.MemoryPlan | None = None

    def run(self) -> None:
        findings, self.folder = files.find_model(self.question.model)
        self.found += findings
        if self.folder is None:
            return
        config = self._check_files(self.folder)
        if config:
            self._check_tokenizer(self.folder, config)
            if not self._has_failed("files", "config") and self._can_build(config):
                self._check_weights(self.folder)

    def _check_files(self, folder: Path) -> dict[str, Any]:
        """Config of the folder; empty where it is not known."""
        self.current_check = (str(folder), "files")
        files = check_files(folder)
        self.found += files.findings
        self.current_check = (f"--adapter-path {self.question.adapter_path}", "files")
        self.found += _check_adapter(self.question.adapter_path)
        if not files.config:
            return {}
        self.current_check = (str(folder / CONFIG_NAME), "config")
        try:
            config = read_config(folder)
        except ModelError as problem:
            failed = Findings("config")
            failed.fail(str(problem))
            self.found += failed
            return {}
        self.found += check_config(config, None if self._has_failed("files") else files.tensor_names)
        return config

    def _check_tokenizer(self, folder: Path, config: dict[str, Any]) -> None:
        self.current_check = (f"{folder / 'tokenizer.json'}, or tokenizer_config.json,", "tokenizer")
        findings, tokenizer = chat_template.check_tokenizer(
            folder, config, trust_remote_code=self.question.trust_remote_code
        )
        self.found += findings
        if tokenizer is None:
            return
        self.current_check = (f"the chat template in {folder}", "template")
        self.found += chat_template.check_template(tokenizer, config, json.loads(self.question.chat_template_args))

    def _check_weights(self, folder: Path) -> None:
        self.current_check = (f"the model in {folder}", "parameters")
        parameters, self.weights = check_weights(folder, trust_remote_code=self.question.trust_remote_code)
        self.found += parameters
        if self.weights is None:
            return
        self.current_check = (f"the cache of the model in {folder}", "cache")
        checked, self.cache = check_cache(self.weights.model, self.question)
        self.found += checked
        if self.cache is None:
            return
        self.current_check = (f"what a step of the model in {folder} takes", "memory")
        needs = _estimate_needs(self.weights, self.cache, self.question)
        self.found += self._check_memory(needs)

    def _check_memory(self, needs: memory.MemoryNeeds) -> Findings:
        settings = self.question
        machine = memory.estimate_mac(settings.memory_gb) if settings.memory_gb else memory.detect_machine()
        speeds = memory.MachineSpeeds(settings.prefill_tokens_s, settings.disk_gb_s * GB)
        self.plan = memory.plan_memory(needs, machine, int(settings.memory_budget_gb * GB), speeds)
        return memory.check_memory(needs, self.plan)

    def _has_failed(self, *areas: str) -> bool:
        return any(finding.level is FindingLevel.FAIL and finding.area in areas for finding in self.found)

    def _can_build(self, config: Mapping[str, Any]) -> bool:
        """True where the model can be built; code that comes with a model counts only where it is trusted."""
        if not find_custom_code(dict(config)) or self.question.trust_remote_code:
            return True
        unseen = Findings("parameters")
        unseen.fail(
            "not examined: that would run the model's own code",
            "read it, and ask again with --trust-remote-code if you trust it",
        )
        self.found += unseen
        return False


def _check_adapter(path: str) -> Findings:
    findings = Findings("files")
    for name in ADAPTER_FILES if path else ():
        if not (Path(path) / name).is_file():
            findings.fail(f"the adapter's folder {path} has no {name}", "give the folder that mlx_lm.lora has written")
    return findings


def _estimate_needs(weights: LazyModel, cache: CacheSummary, settings: DoctorSettings) -> memory.MemoryNeeds:
    context = find_context_tokens_max(weights.config)
    step_bytes = _estimate_step_bytes(weights, cache, settings.step_tokens, context)
    weight = cache.weight
    return memory.MemoryNeeds(weights.weight_bytes, weight.row_bytes, weight.state_bytes, context, step_bytes)


def _estimate_step_bytes(weights: LazyModel, cache: CacheSummary, step: int, context: int) -> Callable[[int], int]:
    """Memory of a prefill step by depth, interpolated between the graphs of two depths."""
    deepest = min(memory.LENGTHS[-1], context or memory.LENGTHS[-1])
    shallow, deep = min(memory.LENGTHS[0], deepest // 2), deepest
    step = min(step, context or step)
    estimates.zero_weights(weights.model)
    heads = _count_heads(weights.config)
    low, high = (
        estimates.estimate_step_bytes(weights.model, cache.layout, heads, depth, step) for depth in (shallow, deep)
    )
    return lambda tokens: max(low, low + (high - low) * (tokens - shallow) // max(1, deep - shallow))


def _count_heads(config: Mapping[str, Any]) -> int:
    """Heads of the layer that has most; 1 where the config doesn't say."""
    said = (config.get("text_config") or config).get("num_attention_heads")
    return max([count for count in (said if isinstance(said, list) else [said]) if isinstance(count, int)], default=1)
