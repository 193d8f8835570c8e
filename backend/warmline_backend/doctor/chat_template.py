"""Checks of the tokenizer and the chat template: conversations of agents must render, and parse back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.doctor.findings import Findings, format_first
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import find_vocabulary_size, load_model_tokenizer
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.request.params import BadRequestError

Message = dict[str, Any]

USER_MESSAGE: Message = {"role": "user", "content": "What is the weather in Lisbon?"}
SYSTEM_MESSAGE: Message = {"role": "system", "content": "Answer in the manner of warmlinemarker."}
ASSISTANT_MESSAGE: Message = {"role": "assistant", "content": "Sunny."}
TOOL_NAME, TOOL_RESULT = "warmline_weather", "warmlineresult"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": TOOL_NAME, "arguments": '{"city": "Lisbon"}'}}
TOOL_CALL_MESSAGE: Message = {"role": "assistant", "content": None, "tool_calls": [_TOOL_CALL]}
TOOL_RESULT_MESSAGE: Message = {"role": "tool", "tool_call_id": "call_1", "content": TOOL_RESULT}

TEMPLATE_REMEDY = "put the model's own chat_template.jinja into the folder, from the repository that it was made from"
OMISSION_REMEDY = f"nothing, if the model was trained without; otherwise {TEMPLATE_REMEDY}"
CLOCK_FUNCTION = "strftime_now"  # what templates call the clock


def check_tokenizer(
    folder: Path, config: dict[str, Any], *, trust_remote_code: bool
) -> tuple[Findings, TokenizerWrapper | None]:
    findings = Findings("tokenizer")
    try:
        tokenizer = load_model_tokenizer(folder, config, trust_remote_code=trust_remote_code)
    except ModelError as problem:
        findings.fail(str(problem))
        return findings, None
    _check_tokens(tokenizer, find_vocabulary_size(config, tokenizer), findings)
    return findings, tokenizer


def _check_tokens(tokenizer: TokenizerWrapper, rows: int, findings: Findings) -> None:
    known: dict[str, int] = tokenizer.get_vocab()
    beyond = sorted((token for token in known if known[token] >= rows), key=lambda token: known[token])
    if beyond:
        findings.fail(
            f"{len(beyond)} of the tokenizer's {len(known):,} tokens have no row in the embedding, which has {rows:,} "
            f"(vocab_size): {format_first(beyond)}",
            "take the tokenizer from the same repository as the weights",
        )
    else:
        findings.ok(f"{len(known):,} tokens, {rows:,} rows in the embedding")
    texts = {number: text for text, number in known.items()}
    ends = sorted(tokenizer.eos_token_ids)
    if not ends:
        findings.fail(
            "no token is known to end an answer, so answers end only at max_tokens",
            "set eos_token_id in config.json or eos_token in tokenizer_config.json, as the model's repository has it",
        )
    elif unknown := [end for end in ends if end not in texts]:
        findings.fail(
            f"answers are to end at {format_first(map(str, unknown))} (eos_token_id), which the tokenizer does not "
            "have",
            "take config.json and tokenizer from the same repository",
        )
    else:
        findings.ok(f"answers end at {format_first(texts[end] for end in ends)}")


class _TemplateChecker:
    """Renderer of sample conversations as requests are rendered, with the findings about them."""

    def __init__(self, tokenizer: TokenizerWrapper, rows: int, template_args: Mapping[str, Any]) -> None:
        self.findings = Findings("template")
        self._tokenizer = tokenizer
        self._renderer = TemplateRenderer(tokenizer, rows, template_args)
        self.traits = self._renderer.traits

    def render_tokens(self, *messages: Message, **body: Any) -> list[int]:
        """Token ids of a conversation.  Raises BadRequestError where the template refuses it."""
        return self._renderer.render("chat", {"messages": list(messages), **body}).tokens

    def render_text(self, *messages: Message, **body: Any) -> str:
        return str(self._tokenizer.decode(self.render_tokens(*messages, **body)))

    def check_rendered(self, what: str, needle: str, *messages: Message, **body: Any) -> bool:
        """True where the rendered conversation has `needle`; adds a warning otherwise."""
        try:
            if needle in self.render_text(*messages, **body):
                return True
            self.findings.warn(f"the template leaves out {what}", OMISSION_REMEDY)
        except BadRequestError as refused:
            self.findings.warn(f"the template refuses {what}: {_format_reason(refused)}", OMISSION_REMEDY)
        return False


def check_template(
    tokenizer: TokenizerWrapper, config: dict[str, Any], template_args: Mapping[str, Any] | None = None
) -> Findings:
    if not tokenizer.has_chat_template:
        findings = Findings("template")
        findings.warn("there is no chat template, so chats are refused, only completions are served", TEMPLATE_REMEDY)
        return findings
    try:
        template = _TemplateChecker(tokenizer, find_vocabulary_size(config, tokenizer), template_args or {})
        template.render_tokens(USER_MESSAGE)
    except (BadRequestError, ValueError) as refused:
        findings = Findings("template")
        findings.fail(f"a chat of one message can't be rendered: {_format_reason(refused)}", TEMPLATE_REMEDY)
        return findings
    shown = [
        name
        for name, is_shown in (
            ("a user's message", True),
            ("system messages", _check_system(template)),
            ("tools", _check_tools(template, tokenizer)),
        )
        if is_shown
    ]
    template.findings.ok(f"renders {', '.join(shown)}")
    _check_reasoning(template, tokenizer)
    _check_next_turn(template)
    _check_clock(tokenizer, template.findings)
    return template.findings


def _format_reason(refused: Exception) -> str:
    return str(refused).splitlines()[0]


def _check_system(template: _TemplateChecker) -> bool:
    if template.traits.system_messages == "none":
        template.findings.warn(
            "the template leaves out or refuses system messages: their text is put into the first user's message",
            OMISSION_REMEDY,
        )
        return False
    return template.check_rendered("system messages", "warmlinemarker", SYSTEM_MESSAGE, USER_MESSAGE)


def _check_tools(template: _TemplateChecker, tokenizer: TokenizerWrapper) -> bool:
    traits = template.traits
    if not (traits.supports_tools and traits.supports_tool_calls and traits.supports_tool_results):
        parts = {
            "tools": traits.supports_tools,
            "calls": traits.supports_tool_calls,
            "a tool's result": traits.supports_tool_results,
        }
        missing = ", ".join(part for part, shown in parts.items() if not shown)
        template.findings.warn(
            f"the template leaves out {missing}: the model is told in plain text between <tool_call> tags",
            OMISSION_REMEDY,
        )
        return False
    offered = template.check_rendered("tools", TOOL_NAME, USER_MESSAGE, tools=TOOLS)
    answered = offered and template.check_rendered(
        "a tool's result", TOOL_RESULT, USER_MESSAGE, TOOL_CALL_MESSAGE, TOOL_RESULT_MESSAGE, tools=TOOLS
    )
    if offered and not tokenizer.has_tool_calling:
        template.findings.warn(
            "mlx-lm does not know how this model writes tool calls: clients get them as text",
            'name one of mlx-lm\'s tool parsers in tokenizer_config.json, as "tool_parser_type"',
        )
    return answered


def _check_reasoning(template: _TemplateChecker, tokenizer: TokenizerWrapper) -> None:
    try:
        on, off = (
            template.render_tokens(USER_MESSAGE, chat_template_kwargs={"enable_thinking": choice})
            for choice in (True, False)
        )
    except BadRequestError as refused:
        template.findings.warn(f"the template refuses enable_thinking: {_format_reason(refused)}", TEMPLATE_REMEDY)
        return
    if not tokenizer.has_thinking:
        template.findings.ok("no reasoning: the tokenizer has no tokens that open and close it")
    elif on != off:
        template.findings.ok(
            f"reasons between {tokenizer.think_start} and {tokenizer.think_end}; enable_thinking turns it on and off"
        )
    else:
        template.findings.ok(
            f"reasoning stands between {tokenizer.think_start} and {tokenizer.think_end}; "
            "enable_thinking makes no difference to the template"
        )


def _check_next_turn(template: _TemplateChecker) -> None:
    """Check that the second turn begins with the first: nothing of it can be reused otherwise."""
    try:
        first = template.render_tokens(SYSTEM_MESSAGE, USER_MESSAGE, add_generation_prompt=False)
        second = template.render_tokens(SYSTEM_MESSAGE, USER_MESSAGE, ASSISTANT_MESSAGE, USER_MESSAGE)
    except BadRequestError:
        return  # system messages or ends that the template refuses: said above, or no matter
    if second[: len(first)] != first:
        template.findings.warn(
            "the second turn of a conversation does not begin with the first one, so the cache can't help there",
            TEMPLATE_REMEDY,
        )
    else:
        template.findings.ok("the next turn begins with the last one: it can be reused")


def _check_clock(tokenizer: TokenizerWrapper, findings: Findings) -> None:
    if CLOCK_FUNCTION in str(tokenizer.chat_template or ""):
        findings.warn(
            "the template can put the date into prompts: on the next day conversations start cold",
            "see whether it takes the date as an argument, and set a fixed one",
        )
