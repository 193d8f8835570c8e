"""`warmline gates` against real pairs: a trained model, a random one, and one with a planted cache bug."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from support.pair.pair import FolderOf, Pair
from support.planted.faults import FaultControl
from support.planted.site import planted_bugs
from warmline_run.cli import app

SHORT = ("--turns", "3", "--turn-kb", "0.5", "--timeout-s", "60")


def run_gates(pair: Pair, *words: str) -> Result:
    """Run the command in this process, with the pair's home as the user's."""
    return CliRunner().invoke(app, ["gates", "--url", f"{pair.url}/v1", "--home", str(pair.home.root), *SHORT, *words])


def read_report(pair: Pair, *words: str) -> tuple[int, dict[str, Any]]:
    done = run_gates(pair, "--json", *words)
    return done.exit_code, {gate["name"]: gate for gate in json.loads(done.stdout)["gates"]}


def list_starts(pair: Pair) -> list[str]:
    """Starts of the last requests, and why they were not warmer: for a failure."""
    pair.as_owner("GET", f"{pair.url}/warmline/explain")  # writes the records that are still in memory
    names = ("id", "source", "prompt_tokens", "cached_tokens", "why_not_warmer", "outcome")
    records = pair.as_owner("GET", f"{pair.url}/warmline/requests?count=60").json["requests"]
    return [" ".join(str(record[name]) for name in names) for record in records]


def test_trained_model_passes_all_checks(agent_pair: Pair) -> None:
    code, seen = read_report(agent_pair, "--long-tokens", "6000")
    assert {name: gate["detail"] for name, gate in seen.items() if gate["result"] != "passed"} == {
        "restart": "ends the backend, which interrupts others: add --restart"
    }, list_starts(agent_pair)
    assert code == 0 and len(seen) == 12


def test_random_model_passes_format_checks(warm_pair: Pair) -> None:
    """Its greedy answers change with the least error in its cache."""
    only = [word for name in ("load", "streaming", "any-name", "long-transcript") for word in ("--only", name)]
    done = run_gates(warm_pair, "--turns", "5", *only)
    assert done.exit_code == 0, done.output
    assert "as cold in turns 1, 2, 4, 5" in " ".join(done.output.split()) and "4 passed" in done.output


def test_restart_check_passes_and_detects_planted_bug(tiny_folder: FolderOf, tmp_path: Path) -> None:
    """Nothing looks wrong but the answer: restored as long as it was, with HTTP 200."""
    only = ("--only", "restart", "--restart", "--long-tokens", "1500")
    with FaultControl(restart_delay_s=0.1) as planted:
        environment = {**planted.environment, "PLANTED_BUGS": "1"}
        with Pair(tmp_path, tiny_folder("llama"), environment=environment) as pair:
            backend = pair.pid("backend")
            code, seen = read_report(pair, *only)
            assert (code, seen["restart"]["result"]) == (0, "passed"), seen
            assert pair.pid("backend") != backend
            with planted.active_bug(planted_bugs.SKIPPED_LAYER):
                code, seen = read_report(pair, *only)
            assert (code, seen["restart"]["result"]) == (1, "failed"), seen
            assert "the warm answer is not the cold one" in seen["restart"]["detail"]
