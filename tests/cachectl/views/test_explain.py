"""View of two prompts side by side."""

from typing import Any

import pytest

from warmline_cachectl.views.explain import MARK_CLOSE, MARK_OPEN, render_comparison, render_explanation
from warmline_proxy.explain.diff import Comparison
from warmline_proxy.explain.explain import CauseReport, DiffSide, DivergencePoint, ExplainReply, StoredState
from warmline_proxy.store.rows import RequestRecord


def render_side(text: str, monkeypatch: pytest.MonkeyPatch, differs: tuple[int, int] = (0, 1)) -> str:
    """Text of a side as a narrow terminal without colours shows it; what differs is in <>."""
    monkeypatch.setenv("COLUMNS", "80")
    side = DiffSide(tokens=[1], text=text, differs=[differs])
    where = DivergencePoint(token=0, begins=0, message=0, message_last=0, role="")
    comparison = Comparison(
        a="a", b="b", tokens_a=1, tokens_b=1, common=0, same_root=True, where=where, side_a=side, side_b=side
    )
    return str([*render_comparison(comparison)][-1]).replace(MARK_OPEN, "<").replace(MARK_CLOSE, ">")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("X\nb", "<X>\nb"),
        ("X\n\n\nb", "<X>\n\n\nb"),
        ("X\n\n\n\nb", "<X>\n(3 blank lines)\nb"),
        ("X\n \n\t\n  \n\nb\n\n\n\n\n\n", "<X>\n(4 blank lines)\nb\n(5 blank lines)\n"),
    ],
)
def test_long_runs_of_blank_lines_are_counted(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert render_side(text, monkeypatch) == shown


def test_blank_lines_that_differ_stay_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert render_side("a\n\n\n\n\nb", monkeypatch, (1, 6)) == "a<\n(4 blank lines)\n>b"


@pytest.mark.parametrize(
    ("reason", "cause", "shown", "omitted"),
    [
        ("in memory up to token 88", "new-text", "prompt tokens (resident; in memory up to token 88)", "why no more"),
        ("evicted after token 88", "evicted", "why no more was reused: evicted after token 88", "resident; "),
        ("", "warm", "prompt tokens (resident)\n", "why no more"),
    ],
)
def test_reason_is_shown_only_where_more_could_be_reused(reason: str, cause: str, shown: str, omitted: str) -> None:
    record = RequestRecord(
        id="r", at=0.0, endpoint="chat", client_model="m", outcome="ok", source="resident", prompt_tokens=100,
        cached_tokens=88, why_not_warmer=reason,
    )  # fmt: skip
    now = StoredState(session="", tokens=0, branch=False)
    reply = ExplainReply(
        request=record, verdict=CauseReport(cause=cause, means="It is so."), besides=[], now=now, waits=[]
    )
    text = "\n".join(map(str, render_explanation(reply)))
    assert shown in text and omitted not in text


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        (
            {"generated_tokens": 11, "decode_passes": 8, "drafted_tokens": 6, "accepted_tokens": 3},
            "decoded 11 tokens in 8 steps; 3 of 6 draft tokens were right\n",
        ),
        (
            {
                "generated_tokens": 2000,
                "decode_passes": 900,
                "drafted_tokens": 1500,
                "accepted_tokens": 1100,
                "accepted_by_source": {"grammar": 1100, "prompt_lookup": 0},
            },
            "1,100 of 1,500 draft tokens were right (1,100 by grammar, 0 by prompt_lookup)\n",
        ),
        (
            {"generated_tokens": 1, "decode_passes": 1, "no_drafts": "speculation is off"},
            "decoded 1 token in 1 step; no drafts: speculation is off\n",
        ),
        ({"generated_tokens": 0, "decode_passes": 0}, "prompt tokens (cold)\n\nwarm: It is so."),
    ],
)
def test_decoding_is_shown_with_its_drafts(facts: dict[str, Any], shown: str) -> None:
    record = RequestRecord(id="r", at=0.0, endpoint="chat", client_model="m", outcome="ok", source="cold", **facts)
    now = StoredState(session="", tokens=0, branch=False)
    verdict = CauseReport(cause="warm", means="It is so.")
    reply = ExplainReply(request=record, verdict=verdict, besides=[], now=now, waits=[])
    assert shown in "\n".join(map(str, render_explanation(reply)))
