"""A shell completes `warmline` and its flags."""

import pytest

from warmline_run.cli import app


def test_shell_completes_commands_and_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, expected in (("warmline ser", {"serve", "service"}), ("warmline serve --disk", {"--disk-budget-gb"})):
        monkeypatch.setenv("_WARMLINE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        with pytest.raises(SystemExit):
            app(prog_name="warmline")
        assert set(capsys.readouterr().out.split()) == expected
