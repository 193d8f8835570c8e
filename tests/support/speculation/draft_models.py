"""Models with a draft model: an inexact copy of themselves, which often agrees, or a model of another family."""

import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from support import tiny_models
from support.backend.families import ARCHITECTURES, QUANTIZATIONS
from support.speculation.drafts import AnyLengthCosts, FixedSpeculation
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_backend.speculation.model_drafter import ModelDrafter
from warmline_backend.speculation.pass_costs import PassCosts
from warmline_backend.speculation.speculation import Speculation

INEXACT = "inexact"  # name of a draft model that is the model itself with some noise in its weights
NOISE = 0.02  # of each weight
ALWAYS_WORTH_IT = PassCosts({1: 1.0, 32: 1.01}, 0.001)
STRANGER_SEED = 7


def build_inexact_copy(source: Path, folder: Path, noise: float = NOISE) -> Path:
    """Make a copy of a model whose weights have some noise, once."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(source / name, folder / name)
    mx.random.seed(5)
    weights: Any = mx.load(str(source / "model.safetensors"))
    changed = {name: array * (1 + noise * mx.random.normal(array.shape)) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), changed, {"format": "mlx"})
    return folder


@cache
def load_drafted(family: str, draft: str, root: Path) -> ServedModel:
    """Model of a family with a draft model: INEXACT, or a family's with other random weights."""
    architecture = ARCHITECTURES.get(family, family)
    folder = tiny_models.build(architecture, root / architecture)
    if draft == INEXACT:
        draft_folder = build_inexact_copy(folder, root / f"{architecture}-inexact")
    else:
        draft_folder = tiny_models.build(draft, root / f"{draft}-stranger", seed=STRANGER_SEED)
    quantization = QUANTIZATIONS.get(family)
    return load_served_model(str(folder), family, draft_path=str(draft_folder), quantization=quantization)


def make_model_speculation(served: ServedModel, costs: PassCosts | None = ALWAYS_WORTH_IT) -> Speculation:
    """Speculation with the draft model; `costs` as it takes them."""
    assert served.draft is not None
    model = ModelDrafter(served.draft, served.vocabulary_size)
    return Speculation(None, model) if costs is None else FixedSpeculation(costs, model)


def make_eager_speculation(served: ServedModel, seed: int = 1) -> Speculation:
    """Speculation that asks the draft model for drafts of any length, however often they are wrong."""
    speculation = make_model_speculation(served, None)
    speculation.costs = AnyLengthCosts(random.Random(seed))
    return speculation
