"""Check of a draft model: its folder, its tokenizer beside the model's, and the memory that both take."""

from dataclasses import replace

from mlx.utils import tree_reduce
from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.doctor.checkpoint import LazyModel
from warmline_backend.doctor.estimates import CacheSummary
from warmline_backend.doctor.files import find_model
from warmline_backend.doctor.findings import CheckError, Findings, format_bytes
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.model.drafted_model import DraftModel
from warmline_backend.model.model import (
    find_vocabulary_size,
    measure_kv,
    measure_pair,
    open_draft_model,
    pair_models,
    run_probe,
)


def check_draft_model(
    findings: Findings, settings: DoctorSettings, tokenizer: TokenizerWrapper, weights: LazyModel, cache: CacheSummary
) -> DraftModel:
    """The draft model with its weights unread.  Raises CheckError, ModelError."""
    folder = find_model(findings, settings.draft_model)
    rows = find_vocabulary_size(weights.config, tokenizer)
    draft = open_draft_model(str(folder), tokenizer, rows, trust_remote_code=settings.trust_remote_code)
    try:
        sizes = measure_kv(draft.layout, run_probe(draft.model, draft.layout)[1])
    except Exception as error:  # whatever a model that does not fit its own weights raises
        todo = "take its config.json and weights from the same repository"
        raise CheckError(f"the draft model can't compute a token: {type(error).__name__}: {error}", todo) from error
    rows_text = f"{format_bytes(sizes.row_bytes)} of KV a token" if sizes.row_bytes else "no KV that grows"
    states = f", {format_bytes(sizes.state_bytes)} of state a conversation" if sizes.state_bytes else ""
    taken = f"{format_bytes(_count_bytes(draft))} of weights, {rows_text}{states}"
    findings.ok(f"the draft model has the model's tokenizer; it takes {taken}, which is part of the memory below")
    if draft.layout.has_states and not cache.layout.has_states:
        findings.warn(
            "the draft model has recurrent layers, unlike the model: a conversation resumes at its checkpoints only",
            "prefer a draft model without them",
        )
    return draft


def _count_bytes(draft: DraftModel) -> int:
    return int(tree_reduce(lambda held, weight: held + weight.nbytes, draft.model.parameters(), 0))


def add_draft_model(weights: LazyModel, cache: CacheSummary, draft: DraftModel) -> tuple[LazyModel, CacheSummary]:
    """Model and cache together with those of the draft model, for the memory of both."""
    paired, whole = pair_models(weights.model, cache.layout, draft)
    sizes = measure_pair(cache.layout, whole, run_probe(paired, whole)[1])
    both = replace(weights, model=paired, weight_bytes=weights.weight_bytes + _count_bytes(draft))
    return both, replace(cache, layout=whole, weight=sizes)
