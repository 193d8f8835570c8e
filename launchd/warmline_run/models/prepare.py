"""Configured models with the demo model's folder in place of its name."""

from dataclasses import replace

from warmline_common.settings.models import ModelConfig, parse_models
from warmline_common.settings.resolve import EffectiveSetting, ResolvedConfig
from warmline_common.settings.table import DEMO_MODEL
from warmline_run import processes


def prepare_models(config: ResolvedConfig) -> list[ModelConfig]:
    """Configured models; none for a single one.  Prepares the demo model as `processes.prepare_model` does."""
    return [_prepare_demo(config, each) for each in parse_models(str(config["models"]))]


def _prepare_demo(config: ResolvedConfig, model: ModelConfig) -> ModelConfig:
    if model.path != DEMO_MODEL:
        return model
    demo = EffectiveSetting(DEMO_MODEL, config.effective_settings["models"].source)
    return replace(model, path=processes.prepare_model(ResolvedConfig({**config.effective_settings, "model": demo})))
