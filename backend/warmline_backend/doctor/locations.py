"""Where a model lies on this machine.  Never downloads."""

from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from warmline_backend.doctor.findings import Findings
from warmline_backend.model.model import can_be_repository

LOCATION_REMEDY = "give a model's folder, or a repository's name, owner/model"


def find_model(model: str) -> tuple[Findings, Path | None]:
    """The folder that a path or a repository's name means; None with the finding that says why there is none."""
    findings = Findings("files")
    try:
        local = Path(model).expanduser()
        is_folder, is_there = bool(model) and local.is_dir(), bool(model) and local.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such user's home, a name that is too long ...
        findings.fail(f"{model}: no folder can be called so: {error}", LOCATION_REMEDY)
        return findings, None
    if is_folder:
        return findings, local
    if is_there:
        findings.fail(f"{model} is a file", "give the folder that it lies in")
        return findings, None
    if not can_be_repository(model):
        findings.fail(f"{model}: there is no such folder", LOCATION_REMEDY)
        return findings, None
    return findings, _find_snapshot(model, findings)


def _find_snapshot(repository: str, findings: Findings) -> Path | None:
    """The snapshot of a repository's main branch in the hub's cache."""
    cache = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        commit = (cache / "refs" / "main").read_text().strip()
    except OSError:
        commit = ""
    folder = cache / "snapshots" / commit
    if commit and folder.is_dir():
        return folder
    findings.fail(
        f"{repository} is neither a folder here nor in the hub's cache ({cache})",
        f"download it first: hf download {repository}",
    )
    return None
