"""`warmline doctor` on several configured models: each of them, and the sets that fit into memory together."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from support.run.warmline_command import run_warmline
from warmline_backend.doctor.findings import FindingLevel
from warmline_backend.doctor.memory import MachineMemory, MemoryNeeds, plan_memory
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.doctor.several.examinations import make_settings
from warmline_backend.doctor.several.fit import FitPlan, ModelNeed, RoundedFit, plan_fit, round_fit
from warmline_backend.doctor.several.report import describe_fit, format_amount
from warmline_common.process.arguments import GB, MB
from warmline_common.settings.models import ModelConfig
from warmline_run.keeper.sizes import _parse_report


def plan(memory_gb: int, *pinned: str, **need_gb: int) -> FitPlan:
    needs = [ModelNeed(name, gb * GB, is_pinned=name in pinned) for name, gb in need_gb.items()]
    return plan_fit(needs, memory_gb * GB)


def round_gb(memory_gb: int, *pinned: str, **need_gb: int) -> RoundedFit:
    return round_fit(
        [ModelNeed(name, gb * GB, is_pinned=name in pinned) for name, gb in need_gb.items()], memory_gb * GB
    )


def test_models_that_all_fit_are_one_set() -> None:
    fit = plan(60, a=10, b=20, c=30)
    assert fit.is_all and fit.sets == (("a", "b", "c"),) and not fit.pairs and not fit.unservable


def test_sets_are_maximal_and_cover_each_model() -> None:
    fit = plan(60, a=10, b=20, c=30, d=50)
    assert not fit.is_all
    assert fit.sets == (("a", "b", "c"), ("a", "d"))
    assert fit.pairs == (("b", "d"), ("c", "d"))


def test_each_pair_of_three_models_is_a_set() -> None:
    assert plan(5, a=2, b=2, c=3).sets == (("a", "b"), ("a", "c"), ("b", "c"))


def test_pinned_models_are_in_each_set() -> None:
    fit = plan(60, "a", a=30, b=20, c=20, d=31, e=61)
    assert fit.sets == (("a", "b"), ("a", "c"))
    assert (fit.pairs, fit.too_large, fit.beside_pinned) == ((("b", "c"),), ("e",), ("d",))
    assert fit.unservable == ("e", "d")


def test_pinned_models_that_do_not_fit_leave_no_set() -> None:
    fit = plan(60, "a", "b", a=30, b=31, c=1)
    assert fit.is_pinned_too_large and fit.sets == () and fit.beside_pinned == ("c",)


def test_pinned_models_alone_are_a_set() -> None:
    assert plan(60, "a", a=60, b=1).sets == (("a",),)
    assert plan(60, b=61).sets == ()


def test_64_models_have_at_most_64_sets() -> None:
    fit = plan(100, **{f"m{number}": 20 + number % 30 for number in range(64)})
    assert 1 < len(fit.sets) <= 64
    assert {name for names in fit.sets for name in names} == {f"m{number}" for number in range(64)}


def test_pinned_model_that_is_too_large_takes_no_room_from_others() -> None:
    fit = plan(60, "a", a=61, b=20, c=40)
    assert (fit.too_large, fit.pinned, fit.sets) == (("a",), (), (("b", "c"),))


def test_64_names_are_cut_in_lines() -> None:
    lines = list(describe_fit(round_gb(60, **{f"m{number}": 40 for number in range(20)})))
    assert lines[1][1].endswith("m7; 12 more (--json has all)")


def test_lines_say_what_fits() -> None:
    assert list(describe_fit(round_gb(60, a=10, b=20))) == [
        (FindingLevel.OK, "All fit together (a + b): none is unloaded for another.")
    ]
    assert list(describe_fit(round_gb(60, "a", a=30, b=20, c=20, d=31, e=61))) == [
        (FindingLevel.FAIL, "e can never be loaded: it needs 1.0 GB more than there are."),
        (
            FindingLevel.FAIL,
            "d can never be loaded: it needs 1.0 GB more than there are beside what is pinned (a).",
        ),
        (FindingLevel.WARN, "They don't all fit together: a request for one may have another one unloaded."),
        (FindingLevel.OK, "Fit together: a + b; a + c"),
        (FindingLevel.WARN, "Never loaded together: b and c"),
    ]


def test_lines_about_models_that_never_fit_contradict_no_other() -> None:
    assert list(describe_fit(round_gb(60, "a", "b", a=30, b=31))) == [
        (FindingLevel.FAIL, "Pinned models don't fit together (a + b): 1.0 GB more are needed than there are.")
    ]
    assert [line for _, line in describe_fit(round_gb(60, "a", a=61, b=62))] == [
        "a can never be loaded: it needs 1.0 GB more than there are.",
        "b can never be loaded: it needs 2.0 GB more than there are.",
    ]
    assert [line for _, line in describe_fit(round_gb(60, "a", a=30, b=31, c=10))] == [
        "b can never be loaded: it needs 1.0 GB more than there are beside what is pinned (a).",
        "The others fit together (a + c): none is unloaded for another.",
    ]
    assert [line for _, line in describe_fit(round_gb(60, a=61, b=20))][1:] == ["b fits: none is unloaded for another."]


@pytest.mark.parametrize(
    ("parts", "memory_bytes", "step_bytes"),
    [
        ([(60 * GB, 2 * GB, GB), (30 * GB, GB, GB // 2)], 96 * GB, GB // 10),
        ([(60 * GB, 2 * GB, GB // 20)], 96 * GB, GB // 100),  # a small part has digits, too
        ([(400_000, 192_440_000, 4_330_000)], 25 * GB, MB // 10),
        ([(60 * GB, 0, 0), (30 * GB, 0, 0)], 90 * GB - 1, 1),  # one byte is missing
        ([(60 * GB, 0, 0), (30 * GB, 0, 0)], 90 * GB, GB // 10),
        ([], 90 * GB, 1),
    ],
)
def test_rounding_keeps_the_plan_and_shows_each_part(
    parts: list[tuple[int, int, int]], memory_bytes: int, step_bytes: int
) -> None:
    needs = [ModelNeed(f"m{number}", *each) for number, each in enumerate(parts)]
    rounded = round_fit(needs, memory_bytes)
    assert rounded.step_bytes == step_bytes
    assert rounded.fit.sets == plan_fit(needs, memory_bytes).sets
    assert rounded.fit.need_bytes == sum(part for each in rounded.needs for part in each.parts)
    assert [[part > 0 for part in each.parts] for each in rounded.needs] == [
        [part > 0 for part in each.parts] for each in needs
    ]


@pytest.mark.parametrize(
    ("count", "step_bytes", "shown"),
    [
        (96 * GB, GB // 10, "96.0 GB"),
        (GB // 10, GB // 10, "0.1 GB"),
        (GB // 20, GB // 100, "50 MB"),
        (1_240 * GB, GB // 100, "1,240.00 GB"),
        (192_400_000, MB // 10, "192.4 MB"),
        (25 * GB + MB // 10, MB // 10, "25.0001 GB"),
        (20_000, 1000, "0.020 MB"),
        (7, 1, "0.000007 MB"),
    ],
)
def test_amounts_are_shown_to_their_step(count: int, step_bytes: int, shown: str) -> None:
    assert format_amount(count, step_bytes) == shown


def test_need_is_what_the_keeper_reckons_with() -> None:
    """Also for a context that is shorter than the shortest, and for a budget that is less than it takes."""
    machine = MachineMemory(10 * GB, "a machine")
    for budget_bytes in (0, 5 * MB, 50 * MB):
        plan_of_one = plan_memory(MemoryNeeds(GB, 1000, 200, 4096, lambda tokens: 3 * tokens), machine, budget_bytes)
        load = plan_of_one.load
        report = {"memory": {"machine_bytes": 10 * GB, "load": asdict(load)}}
        assert _parse_report(report, "/m", "").size == load
        shortest = plan_of_one.lengths[0]
        assert (load.step_bytes, load.kv_min_bytes) == (shortest.step_bytes, shortest.kv_bytes)
        assert load.floor_bytes == min(shortest.kv_bytes, budget_bytes or shortest.kv_bytes)


def test_own_settings_precede_those_of_all() -> None:
    model = ModelConfig("a", "/a", settings={"kv_bits": 4, "max_tokens": 9, "temp": 0.5})
    common = DoctorSettings("/b", called="x", kv_bits=8, prefill_step_size=512)
    assert make_settings(model, common) == DoctorSettings("/a", kv_bits=4, prefill_step_size=512)


@dataclass(frozen=True)
class Reports:
    """Doctor on two models, of which `one` is pinned: with memory for both, and, as text, for `one` alone."""

    of_both: Any
    text: str


@pytest.fixture(scope="module")
def reports(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Reports:
    first, second = tiny_folder("llama", tools=True), tiny_folder("gemma3", tools=True)
    root = tmp_path_factory.mktemp("home")
    (root / "warmline.toml").write_text(
        f"[[models]]\nname = 'one'\npath = '{first}'\npinned = true\n[[models]]\nname = 'two'\npath = '{second}'\n"
    )
    home = ("--home", str(root), "--memory-gb", "16")
    whole = run_warmline("doctor", *home, "--json")
    assert whole.returncode == 0, whole.stderr
    report = json.loads(whole.stdout)
    memory_gb = (max(each["memory"]["need_bytes"] for each in report["models"]) + 1000) / GB
    text = run_warmline("doctor", *home, WARMLINE_MODELS_MEMORY_GB=f"{memory_gb:.15g}")
    assert text.returncode == 1
    return Reports(report, text.stdout)


def test_doctor_examines_all_configured_models(reports: Reports) -> None:
    report, text = reports.of_both, reports.text
    assert [(each["name"], each["pinned"], each["verdict"]) for each in report["models"]] == [
        ("one", True, "ok"),
        ("two", False, "ok"),
    ]
    needs = [each["memory"]["need_bytes"] for each in report["models"]]
    assert report["servable"] and report["together"]["all"] and report["together"]["need_bytes"] == sum(needs)
    assert report["together"]["sets"] == [["one", "two"]]
    assert "two can never be loaded: it needs " in text
    assert "more than there are beside what is pinned (one)." in text
    assert "\none, pinned\n" in f"\n{text}"
    assert "It can be served" not in text and "with the weights" not in text


def test_table_of_needs_adds_up(reports: Reports) -> None:
    table = reports.text.partition("\nMemory\n")[2].splitlines()[1:4]
    rows = [[float(number) for number in re.findall(r"([\d.]+) MB", line)] for line in table]
    assert [round(sum(row[:3]), 6) for row in rows] == [row[3] for row in rows]
    assert [round(sum(column), 6) for column in zip(*rows[:2], strict=True)] == rows[2]
    assert all(number > 0 for row in rows for number in row)


def test_doctor_with_argument_examines_that_model_alone(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "warmline.toml").write_text("[[models]]\npath = '/nowhere/x'\n[[models]]\npath = '/nowhere/y'\n")
    folder = tiny_folder("llama", tools=True)
    done = run_warmline("doctor", str(folder), "--home", str(tmp_path), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["model"] == str(folder)
    all_of_them = run_warmline("doctor", "--home", str(tmp_path))
    assert (
        all_of_them.returncode == 1
        and "The need of x and y is not known: see FAIL above." in all_of_them.stdout
        and "Traceback" not in all_of_them.stderr
    )


def test_reserved_template_argument_of_one_model_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "warmline.toml").write_text("[[models]]\npath = '/x'\nchat_template_args = {tools = 1}\n")
    done = run_warmline("doctor", "--home", str(tmp_path))
    assert done.returncode == 2 and "--chat-template-args may not set tools" in done.stderr
