"""A small storm over several models in every run of the tests; `make models-chaos` has a larger one."""

from pathlib import Path

from support.pair.models_pair import ModelsPair, PairModel
from support.pair.pair import FolderOf
from support.storm.models_storm import FAMILIES, FLAGS, MEMORY_GB_REFERENCE, list_kills, run_models_storm

SEED, CONVERSATIONS, TURNS = 20261130, 6, 12
PINNED = FAMILIES[0]


def test_storm_loses_no_conversation(tiny_folder: FolderOf, tmp_path: Path) -> None:
    models = [PairModel(each, tiny_folder(each), pinned=each == PINNED) for each in FAMILIES]
    pair = ModelsPair(tmp_path / "home", models, *FLAGS, memory_gb=MEMORY_GB_REFERENCE)
    report = run_models_storm(pair, SEED, CONVERSATIONS, TURNS, list_kills(keepers=1, proxies=1, backends=1))
    print(report.format_table())
    assert report.failures == []
    assert report.log.counts["answered"] == TURNS
    assert report.reuses and report.load_count > len(FAMILIES)
