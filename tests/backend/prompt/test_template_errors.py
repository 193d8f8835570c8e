"""Errors of templates are reported as far as the words are the template's own."""

from pathlib import Path

import pytest

from support.backend.small_tokenizers import make_byte_level_tokenizer
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.request.params import BadRequestError

SAID = "the river sang"
REFUSES = "the model's chat template refuses these messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ raise_exception('bad start: ' + messages[0].content) }}", "bad start: …"),
        ("{{ raise_exception('no ' + messages[0].content) }}", "TemplateError"),
        ("{{ raise_exception(messages[0].content) }}", "TemplateError"),
        ("{{ nothing.more }}", "'nothing' is undefined"),
        ("{{ messages[0]['content'][messages[0].content].more }}", "… has no attribute …"),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str'),
        ("{{ '%x' % messages[0].content }}", "%x format: an integer is required, not str"),
    ],
)
def test_template_error_hides_message_text(template: str, message: str, tmp_path: Path) -> None:
    renderer = TemplateRenderer(make_byte_level_tokenizer(tmp_path, template))
    with pytest.raises(BadRequestError) as refused:
        renderer.render("chat", {"messages": [{"role": "user", "content": SAID}]})
    assert refused.value.message == f"{REFUSES}: {message}"


def test_template_error_shows_short_arguments_only(tmp_path: Path) -> None:
    renderer = TemplateRenderer(make_byte_level_tokenizer(tmp_path, "{{ raise_exception('it is no good') }}"))
    body = {
        "messages": [{"role": "user", "content": SAID}],
        "chat_template_kwargs": {"a": "low", "b": SAID * 9, "c": [1]},
    }
    with pytest.raises(BadRequestError) as refused:
        renderer.render("chat", body)
    shown = '{"a": "low", "b": "a string", "c": [1]}'
    assert refused.value.message == f"{REFUSES} with the arguments {shown}: it is no good"
