"""Efforts and switches of reasoning that a template does not know: the nearest, and the least for off."""

from typing import Any

import pytest

from support.backend.small_tokenizers import CHATML
from support.backend.template_rendering import MakeRenderer, cache_renderers, render_text
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.request.params import BadRequestError

USER = {"role": "user", "content": "hello"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# Refuses efforts that it does not list, while reasoning is on; the error names them in another order.
LISTED = CHATML + (
    "{% set effort = reasoning_effort | default('xhigh') %}{% if enable_thinking | default(true) %}"
    "{% if effort not in ['low', 'medium', 'xhigh'] %}"
    "{{ raise_exception('no effort ' ~ effort ~ ', only xhigh, medium, low') }}{% endif %}({{ effort }})"
    "{% else %}(off){% endif %}"
)
ALWAYS = (
    "{% if enable_thinking is defined and not enable_thinking %}{{ raise_exception('it always thinks') }}{% endif %}"
)
LOOKUP = CHATML + "({{ {'high': 'deep', 'max': 'deepest'}[reasoning_effort | default('max')] + '' }})"
# Takes any other word for its default.
TWO_WAYS = (
    CHATML + "({{ 'brief' if reasoning_effort == 'low' else 'long' if reasoning_effort == 'high' else 'usual' }})"
)
NEVER = CHATML + "{% if thinking %}{{ raise_exception('it never thinks') }}{% endif %}(plain)"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeRenderer:
    return cache_renderers(tmp_path_factory.mktemp("models"))


def render_end(renderer: TemplateRenderer, **body: Any) -> str:
    """Text in parentheses that the prompt ends with."""
    return render_text(renderer, USER, **body).rpartition("(")[2].removesuffix(")")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LISTED, ("off", "low", "low", "medium", "medium", "xhigh", "xhigh")),
        (ALWAYS + LISTED, ("low", "low", "low", "medium", "medium", "xhigh", "xhigh")),
        (LOOKUP, ("deep", "deep", "deep", "deep", "deep", "deep", "deepest")),
        (TWO_WAYS, ("brief", "brief", "brief", "brief", "long", "long", "long")),
        (NEVER, ("plain",) * 7),
    ],
    ids=["listed", "always on", "lookup", "two ways", "never on"],
)
def test_each_effort_becomes_the_nearest_known_one(
    make: MakeRenderer, template: str, expected: tuple[str, ...]
) -> None:
    renderer = make(template)
    assert tuple(render_end(renderer, reasoning_effort=effort) for effort in EFFORTS) == expected
    nested = tuple(render_end(renderer, reasoning={"effort": effort}) for effort in EFFORTS)
    assert nested == expected


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"thinking": False, "reasoning_effort": "xhigh"},
        {"enable_thinking": False},
        {"reasoning": {"enabled": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
    ],
)
def test_reasoning_that_cannot_be_off_gets_the_least_effort(make: MakeRenderer, body: dict[str, Any]) -> None:
    assert render_end(make(ALWAYS + LISTED), **body) == "low"


def test_default_effort_stays(make: MakeRenderer) -> None:
    for body in ({}, {"thinking": {"type": "adaptive"}}, {"enable_thinking": True}, {"reasoning_effort": None}):
        assert render_end(make(ALWAYS + LISTED), **body) == "xhigh"
        assert render_end(make(TWO_WAYS), **body) == "usual"


def test_template_arguments_are_replaced_only_where_refused(make: MakeRenderer) -> None:
    def render(template: str, **arguments: Any) -> str:
        return render_end(make(template), chat_template_kwargs=arguments)

    assert render(ALWAYS + LISTED, reasoning_effort="high") == "medium"
    assert render(LISTED, enable_thinking=False, reasoning_effort="high") == "off"
    assert render(LISTED, reasoning_effort="low") == "low"
    assert render(TWO_WAYS, reasoning_effort="medium") == "usual"
    for unknown in ("own", 7):
        with pytest.raises(BadRequestError, match="no effort"):
            render(LISTED, reasoning_effort=unknown)
