"""Sequence of all checks: each needs what the checks before it found to be right."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.doctor import chat_template, memory
from warmline_backend.doctor.checkpoint import LazyModel, check_config, check_weights, find_custom_code
from warmline_backend.doctor.drafts.draft_model import add_draft_model, check_draft_model
from warmline_backend.doctor.drafts.pass_costs import check_pass_costs
from warmline_backend.doctor.estimates import CacheSummary, check_cache
from warmline_backend.doctor.files import CONFIG_NAME, check_files, find_model
from warmline_backend.doctor.findings import CheckError, DoctorFinding, FindingLevel, Findings
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import find_context_tokens_max
from warmline_backend.model.step_memory import count_heads, fit_tokens, reckon_step_memory
from warmline_common.process.arguments import GB

P = ParamSpec("P")
T = TypeVar("T")

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")
AREAS = ("files", "config", "parameters", "cache", "drafts", "memory", "tokenizer", "template")  # as they are shown
DAMAGED = "download the named files again; if that changes nothing, this is a fault of warmline doctor"


@dataclass
class Examination:
    """Results of all checks.  Parts are None where an earlier check failed."""

    settings: DoctorSettings
    folder: Path | None = None
    findings: list[DoctorFinding] = field(default_factory=list)
    weights: LazyModel | None = None
    cache: CacheSummary | None = None
    plan: memory.MemoryPlan | None = None

    @property
    def verdict(self) -> FindingLevel:
        """The worst level of all findings."""
        return max((finding.level for finding in self.findings), key=list(FindingLevel).index, default=FindingLevel.OK)

    @property
    def serve_command(self) -> str:
        """Shell command that serves the model with the settings and its needs; "" where a check failed."""
        if self.verdict is FindingLevel.FAIL or self.weights is None:
            return ""
        settings, defaults = self.settings, DoctorSettings(self.settings.model)
        budget = (self.plan.budget_needed_gb if self.plan else 0.0) or settings.memory_budget_gb
        options: list[tuple[str, object, object]] = [  # with the value that need not be given
            ("--model", settings.called or settings.model, ""),
            ("--home", settings.home, ""),
            ("--memory-budget-gb", f"{budget:g}", "0"),
            ("--prefill-step-size", settings.prefill_step_size, defaults.prefill_step_size),
            ("--kv-bits", settings.kv_bits, 0),
            ("--kv-group-size", settings.kv_group_size if settings.kv_bits else 0, 0),
            ("--kv-boundary-layers", settings.kv_boundary_layers if settings.kv_bits else 0, 0),
            ("--kv-boundary-bits", settings.kv_boundary_bits if settings.kv_bits else 0, 0),
            ("--chat-template-args", settings.chat_template_args, defaults.chat_template_args),
            ("--adapter-path", settings.adapter_path, ""),
            ("--speculation", settings.speculation, defaults.speculation),
            ("--draft-model", settings.draft_model, ""),
        ]
        words = [word for flag, value, default in options if value != default for word in (flag, str(value))]
        trusting = settings.trust_remote_code or bool(find_custom_code(self.weights.config))
        return shlex.join(["warmline", "serve", *words, *(["--trust-remote-code"] if trusting else [])])

    def run_checks(self) -> None:
        settings = self.settings
        self.folder = folder = self._run("files", settings.model, find_model, settings.model)
        if folder is None:
            return
        files = self._run("files", str(folder), check_files, folder)
        adapter_path = settings.adapter_path
        self._run("files", f"--adapter-path {adapter_path}", _check_adapter, adapter_path)
        if files is None or not files.config:
            return
        tensor_names = None if self._has_failed("files") else files.tensor_names
        config = self._run("config", str(folder / CONFIG_NAME), check_config, folder, tensor_names)
        if config is None:
            return
        trust = settings.trust_remote_code
        subject = f"{folder / 'tokenizer.json'}, or tokenizer_config.json,"
        tokenizer = self._run("tokenizer", subject, chat_template.check_tokenizer, folder, config, trust)
        if tokenizer is not None:
            template_args = json.loads(settings.chat_template_args)
            subject = f"the chat template in {folder}"
            self._run("template", subject, chat_template.check_template, tokenizer, config, template_args)
        if not self._has_failed("files", "config"):
            self._check_model(folder, find_custom_code(config), tokenizer)

    def _check_model(self, folder: Path, custom_code: str, tokenizer: TokenizerWrapper | None) -> None:
        """Check weights, cache, draft model and memory."""
        settings = self.settings
        if custom_code and not settings.trust_remote_code:
            self._run("parameters", custom_code, _refuse_custom_code)
            return
        subject = f"the model in {folder}"
        self.weights = self._run("parameters", subject, check_weights, folder, settings.trust_remote_code)
        if self.weights is not None:
            self.cache = self._run("cache", f"the cache of {subject}", check_cache, self.weights.model, settings)
        if self.weights is None or self.cache is None:
            return
        both = (self.weights, self.cache)
        if settings.speculation == "off":
            self._run("drafts", "the settings", _check_speculation_off, settings)
        else:
            both = self._check_drafts(folder, tokenizer, self.weights, self.cache)
        self.plan = self._run("memory", f"what a step of {subject} takes", _check_memory, *both, settings)

    def _check_drafts(
        self, folder: Path, tokenizer: TokenizerWrapper | None, weights: LazyModel, cache: CacheSummary
    ) -> tuple[LazyModel, CacheSummary]:
        """Check the draft model and what drafts cost; returns model and cache, those of the draft model included."""
        settings, draft = self.settings, None
        if settings.draft_model and tokenizer is not None:
            what = f"the draft model {settings.draft_model}"
            draft = self._run("drafts", what, check_draft_model, settings, tokenizer, weights, cache)
        if draft is not None or not settings.draft_model:
            self._run("drafts", "the costs of passes", check_pass_costs, folder, cache, settings, draft)
        if draft is None or cache.layout.problem:
            return weights, cache
        return add_draft_model(weights, cache, draft)

    def _run(
        self, area: str, subject: str, check: Callable[Concatenate[Findings, P], T], *args: P.args, **options: P.kwargs
    ) -> T | None:
        """Run a check and add its findings; None where it failed.  An unexpected error is a finding, too."""
        findings = Findings(area)
        try:
            return check(findings, *args, **options)
        except CheckError as error:
            findings.fail(str(error), error.todo)
        except ModelError as error:
            findings.fail(str(error))
        except Exception as error:  # noqa: BLE001  a broken model may raise anything anywhere, and the user needs to know where
            findings.fail(f"{subject} can't be examined: {type(error).__name__}: {error}", DAMAGED)
        finally:
            self.findings += findings
        return None

    def _has_failed(self, *areas: str) -> bool:
        return any(finding.level is FindingLevel.FAIL and finding.area in areas for finding in self.findings)


def examine_model(settings: DoctorSettings) -> Examination:
    """Run all checks on a model: file headers, config and tokenizer, no weights."""
    examination = Examination(settings)
    examination.run_checks()
    examination.findings.sort(key=lambda finding: AREAS.index(finding.area))
    return examination


def _check_adapter(findings: Findings, path: str) -> None:
    for name in ADAPTER_FILES if path else ():
        if not (Path(path) / name).is_file():
            findings.fail(f"the adapter's folder {path} has no {name}", "give the folder that mlx_lm.lora has written")


def _check_speculation_off(findings: Findings, settings: DoctorSettings) -> None:
    if settings.draft_model:
        findings.warn(
            f"the draft model {settings.draft_model} is not loaded: speculation is off",
            'leave out draft_model, or speculation = "off"',
        )
    else:
        findings.ok("nothing is drafted: speculation is off")


def _refuse_custom_code(findings: Findings) -> None:
    findings.fail(
        "not examined: that would run the model's own code",
        "read it, and ask again with --trust-remote-code if you trust it",
    )


def _check_memory(
    findings: Findings, weights: LazyModel, cache: CacheSummary, settings: DoctorSettings
) -> memory.MemoryPlan:
    context = find_context_tokens_max(weights.config)
    machine = memory.estimate_mac(settings.memory_gb) if settings.memory_gb else memory.detect_machine()
    step_bytes = _reckon_step_bytes(weights, cache, settings.step_tokens, context, machine)
    sizes = cache.weight
    needs = memory.MemoryNeeds(weights.weight_bytes, sizes.row_bytes, sizes.state_bytes, context, step_bytes)
    budget_bytes, disk_bytes_s = int(settings.memory_budget_gb * GB), settings.disk_gb_s * GB
    plan = memory.plan_memory(needs, machine, budget_bytes, settings.prefill_tokens_s, disk_bytes_s)
    memory.check_memory(findings, needs, plan)
    memory.check_wired_memory(findings, needs, machine, int(settings.wired_limit_gb * GB))
    return plan


def _reckon_step_bytes(
    weights: LazyModel, cache: CacheSummary, step: int, context: int, machine: memory.MachineMemory
) -> Callable[[int], int]:
    """Memory of a prefill step by depth, of a chunk that is as small as the machine needs it to be."""
    step = min(step, context or step)
    heads = count_heads(weights.config)
    reckoned = reckon_step_memory(weights.model, cache.layout, heads, step, context or memory.LENGTHS[-1])
    sizes = cache.weight

    def step_bytes(tokens: int) -> int:
        room = machine.usable_bytes - weights.weight_bytes - tokens * sizes.row_bytes - sizes.state_bytes
        chunk = fit_tokens(step, room, lambda chunk: reckoned.bytes_for(chunk, tokens))
        return reckoned.bytes_for(chunk, tokens)

    return step_bytes
