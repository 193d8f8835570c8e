"""Lengths of a model's drafts: its own steps count, and where none is worth it, one is tried now and then."""

import itertools
import json
from pathlib import Path

import pytest

from support.speculation.draft_models import INEXACT, load_drafted
from warmline_backend.engine.pass_costs import DRAFT_STEP, find_pass_costs, remember_pass_costs, resolve_pass_costs
from warmline_backend.speculation.model_drafter import (
    MODEL_TOKENS_MAX,
    PAUSE_TOKENS_MAX,
    PAUSE_TOKENS_MIN,
    TRIAL_TOKENS,
    ModelDraftLengths,
)
from warmline_backend.speculation.pass_costs import NOMINAL_COSTS, PASS_TOKENS_MAX, PassCosts, StepCosts

SECONDS = {1: 1.0, 32: 1.3}


def make_lengths(draft_step: float) -> ModelDraftLengths:
    return ModelDraftLengths(StepCosts(PassCosts(SECONDS, draft_step)), 0)


def choose(draft_step: float, acceptance: float) -> int:
    return make_lengths(draft_step).choose_best(1, 100, acceptance)


def test_costly_steps_make_drafts_shorter() -> None:
    lengths = [choose(step, 0.7) for step in (0.0, 0.1, 0.2, 0.4, 0.7)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[2] > 0 == lengths[-1]
    assert [choose(0.1, acceptance) for acceptance in (0.0, 0.1)] == [0, 0] and choose(0.1, 0.95) > choose(0.1, 0.6)
    costs = PassCosts(SECONDS, 0.2)
    assert costs.draft_step == 0.2 and PassCosts({1: 2.0, 32: 3.0}, 0.2).draft_step == 0.1
    assert costs.find_draft_cost(4) == 0.2 * costs.cost(4)
    assert ModelDraftLengths(StepCosts(NOMINAL_COSTS), 0).choose(0, 1, 100, 0.99) <= MODEL_TOKENS_MAX


def list_trials(lengths: ModelDraftLengths, tokens: int, *, is_right: bool) -> list[int]:
    """Places of the trials within so many tokens of an answer whose drafts are not worth it."""
    places = []
    for position in range(tokens):
        if length := lengths.choose(position, 1, 100, 0.0):
            assert length == TRIAL_TOKENS
            places.append(position)
            lengths.record_trial(position, is_right=is_right)
    return places


def test_trials_become_rare_unless_they_are_right() -> None:
    wrong = list_trials(make_lengths(0.1), 6000, is_right=False)
    gaps = [after - before for before, after in itertools.pairwise(wrong)]
    assert wrong[0] == gaps[0] == PAUSE_TOKENS_MIN and gaps[1] == 2 * PAUSE_TOKENS_MIN
    assert gaps == sorted(gaps) and gaps[-1] == PAUSE_TOKENS_MAX
    right = list_trials(make_lengths(0.1), 100, is_right=True)
    assert right == list(range(PAUSE_TOKENS_MIN, 100)), "one that was right is followed by another at once"
    hopeless = make_lengths(2.0)
    assert list_trials(hopeless, 1000, is_right=True) == [], "not even right drafts would be worth it"


def test_step_of_the_draft_model_is_measured_and_remembered(root: Path, tmp_path: Path) -> None:
    served = load_drafted("llama", INEXACT, root)
    costs = resolve_pass_costs(served, "f" * 64, tmp_path)
    assert costs is not None and costs.draft_step > 0
    path = tmp_path / "pass_costs.json"
    remembered = json.loads(path.read_text())
    assert sorted(key.split()[1] == "draft" for key in remembered) == [False, True]
    again = resolve_pass_costs(served, "f" * 64, tmp_path)
    found = find_pass_costs("f" * 64, tmp_path)
    assert again is not None and found is not None
    assert again.draft_step == found.draft_step == costs.draft_step and again.step_s == costs.step_s
    # An entry that was written before there were draft models is as good as ever.
    key = next(key for key in remembered if key.split()[1] != "draft")
    path.write_text(json.dumps({key: remembered[key]}))
    older = resolve_pass_costs(served, "f" * 64, tmp_path)
    assert older is not None and older.step_s == costs.step_s and older.draft_step > 0
    assert find_pass_costs("a" * 64, tmp_path) is None


def test_draft_model_that_is_too_slow_is_reported_at_the_start(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = load_drafted("llama", INEXACT, root)
    for draft_step, is_reported in ((0.1, False), (0.8, True)):
        caplog.clear()
        remembered = remember_pass_costs(tmp_path)
        remembered.remember("f" * 64, [(1, 1.0), (2, 1.02), (3, 1.05)])
        remembered.remember("f" * 64 + DRAFT_STEP, [(1, draft_step)])
        resolve_pass_costs(served, "f" * 64, tmp_path)
        assert ("too slow to gain anything: a token of it takes 0.80" in caplog.text) == is_reported
        assert list_trials(make_lengths(draft_step), 100, is_right=True) != [] or is_reported


def test_trial_is_no_longer_than_a_pass_may_be() -> None:
    lengths = make_lengths(0.01)
    assert [lengths.choose(1000, 1, 100, 0.0, sequences) for sequences in (1, 32, 48, 64)] == [4, 3, 1, 1]
    assert lengths.choose(1000, PASS_TOKENS_MAX - 1, 100, 0.0) <= 1
