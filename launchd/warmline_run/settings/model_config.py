"""Configuration of one of several models, as its backend takes it.  Pure."""

from collections.abc import Mapping

from warmline_common.settings.models import ModelConfig
from warmline_common.settings.parsers import Value
from warmline_common.settings.resolve import EffectiveSetting, ResolvedConfig


def has_several_models(config: ResolvedConfig) -> bool:
    """True where models are configured by `models`, one entry included: their backends have a keeper."""
    return config["models"] != "[]"


def make_model_config(config: ResolvedConfig, model: ModelConfig) -> ResolvedConfig:
    """Settings for all models, with this model's own in their place."""
    source = f"{config.effective_settings['models'].source}: {model.name}:"
    own: Mapping[str, Value] = {"model": model.path, "models": "[]", "served_name": model.name, **model.settings}
    return ResolvedConfig(
        {**config.effective_settings, **{name: EffectiveSetting(value, source) for name, value in own.items()}}
    )
