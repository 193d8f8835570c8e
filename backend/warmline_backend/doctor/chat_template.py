"""Checks of the tokenizer and the chat template: conversations of agents must render, and parse back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.doctor.findings import CheckError, Findings, format_first
from warmline_backend.model.model import find_vocabulary_size, load_model_tokenizer
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.request.params import BadRequestError
from warmline_backend.request.reasoning_effort import EFFORT_ARGUMENT

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
    findings: Findings, folder: Path, config: dict[str, Any], trust_remote_code: bool
) -> TokenizerWrapper:
    """Load the tokenizer and check its tokens.  Raises ModelError."""
    tokenizer = load_model_tokenizer(folder, config, trust_remote_code=trust_remote_code)
    rows = find_vocabulary_size(config, tokenizer)
    ids: dict[str, int] = tokenizer.get_vocab()
    if beyond := sorted((token for token in ids if ids[token] >= rows), key=ids.__getitem__):
        findings.fail(
            f"{len(beyond)} of the tokenizer's {len(ids):,} tokens have no row in the embedding, which has {rows:,} "
            f"(vocab_size): {format_first(beyond)}",
            "take the tokenizer from the same repository as the weights",
        )
    else:
        findings.ok(f"{len(ids):,} tokens, {rows:,} rows in the embedding")
    texts = {number: text for text, number in ids.items()}
    ends = sorted(tokenizer.eos_token_ids)
    if not ends:
        findings.fail(
            "no token is known to end an answer, so answers end only at max_tokens",
            "set eos_token_id in config.json or eos_token in tokenizer_config.json, as the model's repository has it",
        )
    elif unknown := [str(end) for end in ends if end not in texts]:
        what = f"answers are to end at {format_first(unknown)} (eos_token_id), which the tokenizer does not have"
        findings.fail(what, "take config.json and tokenizer from the same repository")
    else:
        findings.ok(f"answers end at {format_first(texts[end] for end in ends)}")
    return tokenizer


class _TemplateChecker:
    """Renderer of sample conversations as requests are rendered, with the findings about them."""

    def __init__(
        self, findings: Findings, tokenizer: TokenizerWrapper, rows: int, template_args: Mapping[str, Any]
    ) -> None:
        self.findings, self._tokenizer = findings, tokenizer
        self._renderer = TemplateRenderer(tokenizer, rows, template_args)
        self.traits = self._renderer.traits

    def render_tokens(self, *messages: Message, **body: Any) -> list[int]:
        """Token ids of a conversation.  Raises BadRequestError where the template refuses it."""
        return self._renderer.render("chat", {"messages": list(messages), **body}).tokens.tolist()

    def check_rendered(self, what: str, needle: str, *messages: Message, **body: Any) -> bool:
        """True where the rendered conversation has `needle`; adds a warning otherwise."""
        try:
            if needle in str(self._tokenizer.decode(self.render_tokens(*messages, **body))):
                return True
            self.findings.warn(f"the template leaves out {what}", OMISSION_REMEDY)
        except BadRequestError as refused:
            self.findings.warn(f"the template refuses {what}: {_format_reason(refused)}", OMISSION_REMEDY)
        return False


def check_template(
    findings: Findings, tokenizer: TokenizerWrapper, config: dict[str, Any], template_args: Mapping[str, Any]
) -> None:
    """Render sample conversations.  Raises CheckError where even the simplest can't be rendered."""
    if not tokenizer.has_chat_template:
        findings.warn("there is no chat template, so chats are refused, only completions are served", TEMPLATE_REMEDY)
        return
    try:
        template = _TemplateChecker(findings, tokenizer, find_vocabulary_size(config, tokenizer), template_args)
        template.render_tokens(USER_MESSAGE)
    except (BadRequestError, ValueError) as refused:
        what = f"a chat of one message can't be rendered: {_format_reason(refused)}"
        raise CheckError(what, TEMPLATE_REMEDY) from None
    shown = ["a user's message"]
    shown += ["system messages"] if _check_system(template) else []
    shown += ["tools"] if _check_tools(template, tokenizer) else []
    findings.ok(f"renders {', '.join(shown)}")
    _check_reasoning(template, tokenizer)
    _check_next_turn(template)
    if CLOCK_FUNCTION in str(tokenizer.chat_template or ""):
        findings.warn(
            "the template can put the date into prompts: on the next day conversations start cold",
            "see whether it takes the date as an argument, and set a fixed one",
        )


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
    parts = {
        "tools": traits.supports_tools,
        "calls": traits.supports_tool_calls,
        "a tool's result": traits.supports_tool_results,
    }
    if missing := ", ".join(part for part, supported in parts.items() if not supported):
        what = f"the template leaves out {missing}: the model gets them as plain text between <tool_call> tags"
        template.findings.warn(what, OMISSION_REMEDY)
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
    if not tokenizer.has_thinking:
        template.findings.ok("no reasoning: the tokenizer has no tokens that open and close it")
        return
    between = f"between {tokenizer.think_start} and {tokenizer.think_end}"
    controls = template.traits.reasoning_controls
    on, off = (template.render_tokens(USER_MESSAGE, enable_thinking=choice) for choice in (True, False))
    if any(value is False for _, value in controls.refused_values):
        least = (
            f"; requests that turn it off get {controls.efforts[0]} effort" if EFFORT_ARGUMENT in controls.names else ""
        )
        template.findings.ok(f"reasons {between}; the template can't turn it off{least}")
    elif on != off:
        template.findings.ok(f"reasons {between}; enable_thinking turns it on and off")
    else:
        template.findings.ok(f"reasoning stands {between}; enable_thinking makes no difference to the template")


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
