"""A short storm in every run of the tests; `make chaos` has a longer one."""

from pathlib import Path

from support.pair.pair import FolderOf
from support.storm.storm import run_storm

SECONDS, SEED = 9.0, 20261232  # an exception, both processes killed, no memory: all within eight seconds
LONG = (600, 1000)  # tokens: less than the long storm has, so that enough happens in seconds


def test_storm_leaves_nothing_wrong_or_hung(tiny_folder: FolderOf, tmp_path: Path) -> None:
    report = run_storm(SECONDS, SEED, tmp_path / "home", tiny_folder("bench"), LONG)
    print(report.format_table())
    assert report.failures == []
    assert report.log.counts["answered"] > 0
    assert report.log.faults.total() > 0
