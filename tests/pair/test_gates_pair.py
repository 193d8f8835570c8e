"""`warmline gates` against real pairs: a trained model through all gates, the backend's restart too; a random one."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from pair import FolderOf, Pair
from warmline_run.cli import app

SHORT = ("--turns", "3", "--turn-kb", "0.5", "--timeout-s", "60")


def gates(pair: Pair, *words: str) -> Result:
    """The command, in this process, as for somebody whose home is the pair's."""
    return CliRunner().invoke(app, ["gates", "--url", f"{pair.url}/v1", "--home", str(pair.home.root), *SHORT, *words])


def test_a_real_pair_passes_every_gate_and_goes_on_after_a_restart(agent_folder: Path, tmp_path: Path) -> None:
    with Pair(tmp_path, agent_folder, "--prefill-step-size", "128") as pair:
        killed = pair.pid("backend")
        done = gates(pair, "--restart", "--strict", "--json", "--long-tokens", "2500")
        assert pair.pid("backend") != killed
    report = json.loads(done.stdout)
    assert {gate["name"]: gate["detail"] for gate in report["gates"] if gate["result"] != "passed"} == {}
    assert done.exit_code == 0 and report["passed"] and len(report["gates"]) == 12


def test_a_random_model_passes_what_needs_no_sense(warm_pair: Pair) -> None:
    """Its greedy answers change with the least error in its cache."""
    only = [word for name in ("load", "streaming", "any-name", "long-transcript") for word in ("--only", name)]
    done = gates(warm_pair, "--turns", "5", *only)
    assert done.exit_code == 0, done.output
    assert done.output.count("passed") == 5 and "as cold in turns 1, 2, 4, 5" in done.output


def test_exact_mode_is_judged_by_its_grid(tiny_folder: FolderOf, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with Pair(home, tiny_folder("llama"), "--reuse", "exact", "--prefill-step-size", "256") as pair:
        port = f"port = {pair.port}\n"
        (home / "warmline.toml").write_text(port + 'reuse = "exact"\nprefill_step_size = 256\n')
        done = gates(pair, "--only", "long-transcript")
    assert done.exit_code == 0, done.output
