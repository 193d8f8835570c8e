"""Arguments for a model's chat template: the server's are defaults, a request's own override them by key."""

import asyncio
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import load_family
from support.backend.small_tokenizers import CHATML, make_byte_level_tokenizer
from warmline_backend.config import RESERVED_TEMPLATE_ARGS, BackendConfigError, parse_config
from warmline_backend.engine.engine import Engine
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.request.params import BadRequestError
from warmline_backend.server.service import Service
from warmline_common.settings.table import SETTINGS
from warmline_common.storage.home import Home

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}

# Thinks unless told not to, tells its effort where there is one, and knows two of them.
THINKING = (
    "{% if effort is defined and effort not in ('low', 'high', none) %}"
    "{{ raise_exception('effort must be low or high') }}{% endif %}"
    + CHATML.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if effort %}[{{ effort }}]{% endif %}"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
        "{% endif %}",
    )
)

MakeRenderer = Callable[..., TemplateRenderer]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return make_byte_level_tokenizer(tmp_path_factory.mktemp("model"), THINKING)


def render_tail(renderer: TemplateRenderer, **body: Any) -> str:
    """Render the end of the prompt, after the assistant's header."""
    tokens = renderer.render("chat", {"messages": [USER], **body}).tokens
    return str(renderer._wrapper.decode(tokens)).rpartition("assistant\n")[2]


@pytest.mark.parametrize(
    ("settings", "request_kwargs", "expected"),
    [
        ({}, None, "<think>"),
        ({"enable_thinking": False}, None, "<think></think>"),
        ({"enable_thinking": False}, {}, "<think></think>"),
        ({"enable_thinking": False}, {"enable_thinking": True}, "<think>"),
        ({}, {"enable_thinking": False}, "<think></think>"),
        ({"enable_thinking": False}, {"effort": "low"}, "[low]<think></think>"),
        ({"enable_thinking": False, "effort": "high"}, {"effort": "low"}, "[low]<think></think>"),
        ({"effort": "high"}, {"effort": None}, "<think>"),
        ({"enable_thinking": False}, {"enable_thinking": None}, "<think>"),
        ({"enable_thinking": False, "effort": None}, None, "<think></think>"),
    ],
)
def test_request_arguments_override_settings_by_key(
    tokenizer: TokenizerWrapper, settings: dict[str, Any], request_kwargs: dict[str, Any] | None, expected: str
) -> None:
    assert (
        render_tail(TemplateRenderer(tokenizer, template_args=settings), chat_template_kwargs=request_kwargs)
        == expected
    )


def test_null_is_passed_as_value(tmp_path: Path) -> None:
    tokenizer = make_byte_level_tokenizer(
        tmp_path, CHATML + "{{ 'undefined' if depth is not defined else depth is none }}"
    )
    body = {"messages": [USER]}
    rendered = {
        name: tokenizer.decode(TemplateRenderer(tokenizer, template_args=args).render("chat", body).tokens)
        for name, args in {"none": {}, "null": {"depth": None}}.items()
    }

    assert rendered["none"].endswith("undefined") and rendered["null"].endswith("True")


def test_enable_thinking_changes_tokens(tokenizer: TokenizerWrapper) -> None:
    body = {"messages": [USER]}
    thinks, does_not = (
        TemplateRenderer(tokenizer, template_args={"enable_thinking": on}).render("chat", body).tokens
        for on in (True, False)
    )
    assert thinks != does_not and does_not[: len(thinks)] == thinks


def test_template_error_by_request_arguments_returns_400(tokenizer: TokenizerWrapper) -> None:
    renderer = TemplateRenderer(tokenizer, template_args={"effort": "high"})
    with pytest.raises(BadRequestError, match=r'\{"effort": "mid"\}: effort must be low or high') as caught:
        render_tail(renderer, chat_template_kwargs={"effort": "mid"})
    assert caught.value.status == 400
    assert render_tail(renderer) == "[high]<think>", "whoever comes next is served"


def test_template_error_by_settings_is_reported_at_start(tokenizer: TokenizerWrapper) -> None:
    with pytest.raises(ValueError, match=r'--chat-template-args \{"effort": "mid"\}: .*effort must be low or high'):
        TemplateRenderer(tokenizer, template_args={"effort": "mid"})


def test_template_error_without_arguments_does_not_blame_them(tmp_path: Path) -> None:
    strict = "{% if messages|length < 2 %}{{ raise_exception('more, please') }}{% endif %}" + CHATML
    renderer = TemplateRenderer(make_byte_level_tokenizer(tmp_path, strict), template_args={"enable_thinking": False})
    assert renderer.render("chat", {"messages": [USER, ANSWER, USER]}).tokens


def test_missing_template_is_reported_and_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    renderer = TemplateRenderer(make_byte_level_tokenizer(tmp_path, None), template_args={"enable_thinking": False})
    assert "has no effect, this model has no chat template" in caplog.text
    assert renderer.render("completion", {"prompt": "hello"}).tokens


def test_process_refuses_settings_that_template_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    flags = ["--home", str(tmp_path / "home"), "--model", str(folder), "--chat-template-args", '{"effort": "mid"}']
    config = parse_config(flags)
    home = Home(config.home)
    home.prepare()

    def make() -> Any:
        model = load_family.__wrapped__("llama", tmp_path)
        object.__setattr__(model, "tokenizer", make_byte_level_tokenizer(tmp_path / "tokenizer", THINKING))
        return SchedulerDriver(model).scheduler

    async def start() -> None:
        engine = Engine(make)
        service = Service(config, home, engine, "boot")
        engine.start()
        try:
            await service.wait_until_loaded()
        finally:
            service.close()
            engine.stop()
            await asyncio.wrap_future(engine.ended)

    with pytest.raises(ValueError, match="effort must be low or high"):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"messages": []}', "--chat-template-args may not set messages"),
        ('{"tools": 1, "chat_template": "x"}', "--chat-template-args may not set chat_template, tools"),
    ],
)
def test_reserved_names_are_refused(given: str, message: str) -> None:
    with pytest.raises(BackendConfigError, match=message):
        parse_config(["--home", "h", "--model", "m", "--chat-template-args", given])


def test_rendering_parameters_are_reserved() -> None:
    """All parameter names of the installed version of transformers."""
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    own = {name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    assert own - {"self"} <= RESERVED_TEMPLATE_ARGS


@pytest.mark.parametrize("given", ["{", "[]", "7", "enable_thinking=false", '{"a": NaN}', '{"a": -Infinity}'])
def test_template_args_that_are_no_object_are_refused(given: str) -> None:
    with pytest.raises(BackendConfigError) as caught:
        parse_config(["--home", "h", "--model", "m", "--chat-template-args", given])
    assert f"{given}: expected a JSON object" in str(caught.value)


def test_template_args_nested_without_end_are_refused_in_a_short_line() -> None:
    with pytest.raises(BackendConfigError) as caught:
        parse_config(["--home", "h", "--model", "m", "--chat-template-args", '{"a":' * 100_000])
    assert "expected a JSON object" in str(caught.value) and len(str(caught.value)) < 4_000


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("chat_template_args", r'{"a": "\ud800"}'),  # half a character
        ("chat_template_args", json.dumps({"a": "x" * 70_000})),
        ("model", "m\0"),
        ("temp", 10**400),
        ("memory_budget_gb", 10**400),
    ],
)
def test_argument_too_long_for_commands_is_refused(name: str, given: object) -> None:
    with pytest.raises(ValueError):
        SETTINGS[name].parse(given)


def test_flag_has_same_rules_as_setting() -> None:
    args = {"enable_thinking": False, "reasoning_effort": None, "greeting": "grüß Gott"}
    config = parse_config(["--home", "h", "--model", "m", "--chat-template-args", json.dumps(args)])
    assert config.template_args == args
