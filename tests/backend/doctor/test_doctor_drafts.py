"""Draft models and measured costs of passes in the doctor's findings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmline_backend.doctor.examine import Examination, examine_model
from warmline_backend.doctor.findings import FindingLevel
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.engine.pass_costs import DRAFT_STEP, WIDTHS, remember_pass_costs
from warmline_backend.model import fingerprint as fingerprints
from warmline_backend.model.fingerprint import compute_fingerprint

FolderOf = Callable[..., Path]
PAIRS = [(width, 0.010 + 0.001 * width) for width in WIDTHS]


def examine(folder: Path, home: Path, **options: Any) -> tuple[Examination, list[tuple[FindingLevel, str]]]:
    examination = examine_model(DoctorSettings(str(folder), home=str(home), **options))
    return examination, [(each.level, each.what) for each in examination.findings if each.area == "drafts"]


def test_memory_of_both_models_is_counted(tiny_folder: FolderOf, tmp_path: Path) -> None:
    folder, draft = tiny_folder("llama", tools=True), tiny_folder("gemma3")
    alone, none = examine(folder, tmp_path)
    both, ((level, what),) = examine(folder, tmp_path, draft_model=str(draft))
    assert none == [] and level is FindingLevel.OK
    assert "the draft model has the model's tokenizer; it takes" in what and "of KV a token" in what
    assert alone.plan is not None and both.plan is not None
    assert both.plan.load.weight_bytes > alone.plan.load.weight_bytes
    assert both.plan.load.kv_min_bytes > alone.plan.load.kv_min_bytes
    assert both.serve_command.endswith(f"--draft-model {draft}")


def test_draft_model_takes_nothing_with_speculation_off(tiny_folder: FolderOf, tmp_path: Path) -> None:
    folder, draft = tiny_folder("llama", tools=True), tiny_folder("gemma3")
    alone, _ = examine(folder, tmp_path)
    off, ((level, what),) = examine(folder, tmp_path, draft_model=str(draft), speculation="off")
    assert level is FindingLevel.WARN and what == f"the draft model {draft} is not loaded: speculation is off"
    assert alone.plan is not None and off.plan is not None
    assert off.plan.load == alone.plan.load
    assert off.serve_command.endswith(f"--speculation off --draft-model {draft}")
    assert examine(folder, tmp_path, speculation="off")[1] == [
        (FindingLevel.OK, "nothing is drafted: speculation is off")
    ]


def test_recurrent_draft_model_is_warned_of(tiny_folder: FolderOf, tmp_path: Path) -> None:
    _, found = examine(tiny_folder("llama", tools=True), tmp_path, draft_model=str(tiny_folder("qwen3_5")))
    assert [level for level, _ in found] == [FindingLevel.OK, FindingLevel.WARN]
    assert "recurrent layers, unlike the model: a conversation resumes at its checkpoints only" in found[1][1]


def test_unusable_draft_model_is_found(tiny_folder: FolderOf, tmp_path: Path) -> None:
    folder = tiny_folder("llama", tools=True)
    missing, ((level, what),) = examine(folder, tmp_path, draft_model=str(tmp_path / "none"))
    assert level is FindingLevel.FAIL and "there is no such folder" in what
    assert missing.serve_command == "" and missing.plan is not None
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    _, ((level, what),) = examine(folder, tmp_path, draft_model=str(other))
    assert level is FindingLevel.FAIL and "'a' is 65, not 64" in what


def test_measured_costs_are_told_without_reading_weights(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, draft, home = tiny_folder("llama", tools=True), tiny_folder("gemma3"), tmp_path / "home"
    models = home / "models"
    models.mkdir(parents=True)
    dtype = "mlx.core.float32"
    alone = compute_fingerprint(folder, None, None, dtype, models)
    both = compute_fingerprint(folder, None, None, dtype, models, draft_path=draft)
    remembered = remember_pass_costs(models)
    for fingerprint in (alone, both):
        remembered.remember(fingerprint, PAIRS)
    remembered.remember(both + DRAFT_STEP, [(1, 0.0011)])

    def refuse(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(fingerprints.hashlib, "file_digest", refuse)
    _, ((level, what),) = examine(folder, home)
    assert level is FindingLevel.OK
    assert what == (
        "a pass of 8 tokens takes 1.6 times as long as one of 1, and one of 32 takes 3.8 times (by what was measured): "
        "drafts pay where 25% of their tokens are right"
    )
    monkeypatch.setenv("WARMLINE_HOME", str(home))
    assert [each.what for each in examine_model(DoctorSettings(str(folder))).findings if each.area == "drafts"] == [
        what
    ]
    _, found = examine(folder, home, draft_model=str(draft))
    assert found[1][1].endswith(
        "; a token of the draft model takes 0.10 of a pass: its drafts pay where 35% of their tokens are right"
    )
    assert len(found) == 2
    remembered.remember(both + DRAFT_STEP, [(1, 0.02)])
    level, what = examine(folder, home, draft_model=str(draft))[1][2]
    assert level is FindingLevel.WARN and "too long beside the model" in what
    (models / "digests.json").unlink()
    assert examine(folder, home)[1] == [], "nothing is read for it"
