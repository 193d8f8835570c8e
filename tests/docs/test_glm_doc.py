"""docs/glm-5.2.md: its figures are those of doctor, and its commands are valid."""

import plistlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support import glm_5_2
from warmline_backend.doctor import report
from warmline_backend.doctor.examine import Examination, examine_model
from warmline_backend.doctor.findings import FindingLevel, format_bytes
from warmline_backend.doctor.settings import DoctorSettings
from warmline_common.settings.resolve import resolve
from warmline_common.settings.table import SETTINGS
from warmline_run.cli import app
from warmline_run.services.service import parse_arguments

TEXT = (Path(__file__).parents[2] / "docs" / "glm-5.2.md").read_text()


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    folder = glm_5_2.write_folder(tmp_path_factory.mktemp("glm") / "GLM-5.2-mxfp4")
    return examine_model(DoctorSettings(str(folder), memory_gb=512, prefill_tokens_s=179, disk_gb_s=3))


def test_glm_table_equals_doctor_output(examined: Examination) -> None:
    assert examined.plan and examined.weights and examined.cache
    rows = [
        [
            f"{length.tokens:,}",
            *map(format_bytes, (length.kv_bytes, length.step_bytes, length.total_bytes, length.disk_bytes)),
            report.format_duration(length.prefill_s),
            report.format_duration(length.restore_s),
        ]
        for length in examined.plan.lengths
    ]
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")
    ]
    assert table[1:] == rows


def test_glm_figures_equal_doctor_output(examined: Examination) -> None:
    assert examined.plan and examined.weights and examined.cache
    assert f"{format_bytes(examined.weights.weight_bytes)} of weights" in TEXT
    assert f"{examined.cache.weight.row_bytes:,} bytes a token" in TEXT
    assert f"three quarters of the memory, {format_bytes(examined.plan.machine.usable_bytes)} of 512 GiB" in TEXT
    assert f"about\n{examined.plan.tokens_max // 1000},000 tokens of one conversation" in TEXT
    raised = int(re.findall(r"iogpu\.wired_limit_mb=(\d+)", TEXT)[0]) << 20
    conversation = examined.plan.lengths[-1]
    share = (raised - examined.weights.weight_bytes) * 0.7
    assert conversation.tokens == 200_000 and int(share / conversation.kv_bytes) == 3
    assert f"about {share / 1e9:.0f} GB, three of\n200,000 tokens" in TEXT
    assert f"`--disk-budget-gb 500` holds\n{int(500e9 / conversation.disk_bytes)} of that length" in TEXT


def test_glm_doctor_needs_no_weights(examined: Examination) -> None:
    assert examined.verdict is FindingLevel.WARN, "of memory alone: the GPU's limit is to be raised"
    assert {finding.area for finding in examined.findings if finding.level is not FindingLevel.OK} == {"memory"}
    assert "21 x CacheList(KVCache, KVCache), 57 x CacheList(KVCache)" in " ".join(f.what for f in examined.findings)


def find_commands(start: str) -> list[list[str]]:
    lines = re.sub(r" \\\n +", " ", TEXT).splitlines()
    return [shlex.split(line) for line in lines if line.startswith(start)]


def test_glm_serve_command_is_valid() -> None:
    (words,) = find_commands(".venv/bin/warmline serve")
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    config = resolve({flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}, {})
    assert config["prefill_step_size"] == "auto" and config["gpu_keepalive"] == 20
    assert config["chat_template_args"] == '{"enable_thinking": false, "reasoning_effort": null}'


def test_glm_toml_equals_command(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "warmline.toml").write_text(text)
    written = resolve({"home": str(tmp_path)}, {})
    (words,) = find_commands(".venv/bin/warmline serve")
    typed = dict(zip(words[2::2], words[3::2], strict=True))
    settings = tomllib.loads(text)
    assert {SETTINGS[name].flag for name in settings} == typed.keys()
    line = resolve({flag.removeprefix("--").replace("-", "_"): value for flag, value in typed.items()}, {})
    assert [written[name] for name in settings] == [line[name] for name in settings]


def test_glm_service_install_is_valid(tmp_path: Path) -> None:
    (words,) = find_commands(".venv/bin/warmline launchd install")
    (text,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "warmline.toml").write_text(text)
    rehearsal = [*words[1:], "--home", str(tmp_path), "--dry-run", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, rehearsal).exit_code == 0
    for role in ("proxy", "backend"):
        agent = plistlib.loads((tmp_path / f"com.warmline.{role}.plist").read_bytes())
        given = parse_arguments(agent["ProgramArguments"])
        assert resolve(given, agent["EnvironmentVariables"])["served_name"] == "glm-5.2", "from the file"
