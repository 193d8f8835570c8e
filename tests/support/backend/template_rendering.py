"""Renderers of test templates, made once each, and the texts that they render."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.backend.small_tokenizers import make_byte_level_tokenizer
from warmline_backend.prompt.renderer import TemplateRenderer

MakeRenderer = Callable[[str], TemplateRenderer]


def cache_renderers(folder: Path) -> MakeRenderer:
    made: dict[str, TemplateRenderer] = {}

    def make(template: str) -> TemplateRenderer:
        if template not in made:
            made[template] = TemplateRenderer(make_byte_level_tokenizer(folder / str(len(made)), template))
        return made[template]

    return make


def render_text(renderer: TemplateRenderer, *messages: Any, **body: Any) -> str:
    return str(renderer._wrapper.decode(renderer.render("chat", {"messages": list(messages), **body}).tokens))
