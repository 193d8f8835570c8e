"""Examinations of all configured models, each with its own settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from warmline_backend.doctor.examine import Examination, examine_model
from warmline_backend.doctor.findings import FindingLevel
from warmline_backend.doctor.memory import MachineMemory, detect_machine, estimate_mac
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.doctor.several.fit import FitPlan, ModelNeed, plan_fit
from warmline_common.measurement.model_memory import ModelSize
from warmline_common.process.arguments import GB
from warmline_common.settings.models import ModelConfig
from warmline_common.settings.table import list_settings


@dataclass(frozen=True)
class SeveralExaminations:
    """Examinations in the models' order.  `fit` is of those whose memory could be estimated."""

    models: tuple[ModelConfig, ...]
    examinations: tuple[Examination, ...]
    machine: MachineMemory
    models_memory_gb: float  # as configured; 0: as the machine allows
    needs: tuple[ModelNeed, ...]
    fit: FitPlan

    @property
    def is_servable(self) -> bool:
        """True where each model can be loaded at some time."""
        failed = any(each.verdict is FindingLevel.FAIL for each in self.examinations)
        return not (failed or self.fit.unservable or self.fit.is_pinned_too_large)


def make_settings(model: ModelConfig, common: DoctorSettings) -> DoctorSettings:
    """Settings of one model's examination: its own go before those that hold for all."""
    names = {setting.name for setting in list_settings("doctor")}
    own: dict[str, Any] = {name: value for name, value in model.settings.items() if name in names}
    return replace(common, model=model.path, called="", **own)


def examine_models(
    models: Sequence[ModelConfig], common: DoctorSettings, models_memory_gb: float
) -> SeveralExaminations:
    """Examine each model, then all together.  `models_memory_gb` is for all together; 0: as the machine allows."""
    examinations = tuple(examine_model(make_settings(model, common)) for model in models)
    machine = estimate_mac(common.memory_gb) if common.memory_gb else detect_machine()
    memory_bytes = min(int(models_memory_gb * GB) or machine.usable_bytes, machine.usable_bytes)
    needs = tuple(
        _make_need(model, examination.plan.load)
        for model, examination in zip(models, examinations, strict=True)
        if examination.plan is not None
    )
    fit = plan_fit(needs, memory_bytes)
    return SeveralExaminations(tuple(models), examinations, machine, models_memory_gb, needs, fit)


def _make_need(model: ModelConfig, size: ModelSize) -> ModelNeed:
    return ModelNeed(model.name, size.weight_bytes, size.step_bytes, size.floor_bytes, model.pinned)
