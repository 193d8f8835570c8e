"""A short storm in every run of the tests; `make chaos` has a longer one."""

from pathlib import Path

from support.pair.pair import FolderOf
from support.storm.storm import run_storm

SECONDS, SEED = 30.0, 20261128
LONG = (600, 1000, 1750)  # tokens: half of what the long storm has, so that as much happens in half a minute


def test_storm_leaves_nothing_wrong_or_hung(tiny_folder: FolderOf, tmp_path: Path) -> None:
    report = run_storm(SECONDS, SEED, tmp_path / "home", tiny_folder("bench"), LONG)
    print(report.format_table())
    assert report.failures == []
    assert report.log.counts["answered"] > 0
    assert report.log.faults.total() > 0
