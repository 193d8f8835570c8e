"""Costs of decode passes that a backend has measured for the model on this machine, and what they mean for drafts."""

import os
from contextlib import suppress
from pathlib import Path

from warmline_backend.doctor.estimates import CacheSummary
from warmline_backend.doctor.findings import Findings
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.engine.pass_costs import find_pass_costs
from warmline_backend.model.drafted_model import DraftModel
from warmline_backend.model.fingerprint import compute_fingerprint, has_digests
from warmline_backend.speculation.model_drafter import MODEL_TOKENS_MAX, is_worth_asking
from warmline_backend.speculation.pass_costs import PASS_TOKENS_MAX, DraftOffer, PassCosts
from warmline_common.settings.table import SETTINGS
from warmline_common.storage.home import Home

WIDTH_SHOWN = 8
SHARES = tuple(percent / 100 for percent in range(5, 100, 5))  # of tokens that turn out right


def check_pass_costs(
    findings: Findings, folder: Path, cache: CacheSummary, settings: DoctorSettings, draft: DraftModel | None
) -> None:
    """Add a finding where costs are remembered for the model as it is; nothing is measured or read for it."""
    with suppress(OSError, ValueError):  # other checks say what is wrong with the files
        if (costs := _find_costs(folder, cache, settings, draft.path if draft is not None else None)) is not None:
            findings.ok(_describe_costs(costs))
            if draft is not None and not is_worth_asking(costs):
                findings.warn(
                    "the draft model takes too long beside the model to gain anything",
                    "choose a smaller one, or leave draft_model out",
                )


def _find_costs(
    folder: Path, cache: CacheSummary, settings: DoctorSettings, draft_path: Path | None
) -> PassCosts | None:
    models = Home(_find_home(settings)).models
    if not has_digests([folder, *([draft_path] if draft_path is not None else [])], models):
        return None
    adapter = Path(settings.adapter_path) if settings.adapter_path else None
    quantization, dtype = settings.kv_quantization, cache.weight.dtype
    fingerprint = compute_fingerprint(folder, adapter, quantization, dtype, models, draft_path=draft_path)
    return find_pass_costs(fingerprint, models)


def _find_home(settings: DoctorSettings) -> Path:
    """The home in force: `home` is given only by the flag."""
    setting = SETTINGS["home"]
    return Path(str(setting.parse(settings.home or os.environ.get(setting.variable) or setting.default)))


def _describe_costs(costs: PassCosts) -> str:
    shown = f"a pass of {WIDTH_SHOWN} tokens takes {costs.cost(WIDTH_SHOWN):.1f} times as long as one of 1, and one of "
    shown += f"{PASS_TOKENS_MAX} takes {costs.cost(PASS_TOKENS_MAX):.1f} times (by what was measured): "
    shown += f"drafts pay {_describe_share(_find_share(costs, PASS_TOKENS_MAX - 1, 0.0))}"
    if costs.draft_step:
        share = _describe_share(_find_share(costs, MODEL_TOKENS_MAX, costs.draft_step))
        shown += f"; a token of the draft model takes {costs.draft_step:.2f} of a pass: its drafts pay {share}"
    return shown


def _describe_share(share: float) -> str:
    return f"where {share:.0%} of their tokens are right" if share else "nowhere"


def _find_share(costs: PassCosts, most: int, token_cost: float) -> float:
    """The least share of right tokens for which a draft is worth its time; 0 where none is."""
    worth = (share for share in SHARES if costs.choose_length(1, [DraftOffer(most, share)], token_cost=token_cost))
    return next(worth, 0.0)
