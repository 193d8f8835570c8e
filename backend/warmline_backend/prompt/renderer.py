"""Rendering of bodies to token ids, with boundaries at which a later prompt may diverge.

A boundary is a number of tokens that lie wholly inside the text up to the end of a message (`boundaries`).
Ends of messages that the template has rewritten since are listed too, to explain a divergence to people.
"""

import inspect
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import TemplateError, UndefinedError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from warmline_backend.prompt.boundaries import RenderedConversation
from warmline_backend.prompt.message_ends import MessageEndCache
from warmline_backend.prompt.messages import ROLES, ChatConversation, extract_reasoning, parse_conversation
from warmline_backend.prompt.render_limits import RenderLimits
from warmline_backend.prompt.replay import ToolCallReplayer, TurnParser, splice_tokens
from warmline_backend.prompt.template_traits import Message, TemplateTraits, is_quoted, probe_template
from warmline_backend.prompt.tokenization.text_tokenizer import TextTokenizer, Tokens
from warmline_backend.prompt.tool_definitions import complete_tool
from warmline_backend.request.field_names import explain_missing_field
from warmline_backend.request.params import BadRequestError, FieldError, Tools, format_json_type
from warmline_common.process.redaction import PLACEHOLDER, is_field_name, quote_text
from warmline_common.protocol.json_structure import convert_integer
from warmline_common.protocol.messages import MessageEnd, SampledTurn
from warmline_common.protocol.surrogates import replace_halves
from warmline_common.protocol.tokens import TokenArray

log = logging.getLogger(__name__)

REPLAY_ATTEMPTS_MAX = 3  # each without the doubtful messages of the last one
ROLES_CACHED_MAX = 64  # that clients invented
ROLE_CHARS_MAX = 16  # shown of a role, which may be any text
_ERROR_CHARS_MAX = 500
_VALUE_CHARS_MAX = 40  # of a value, or of a name, in an error message
_TEMPLATE_TEXT_CHARS_MIN = 8  # of a template's own words, to mean something
_QUOTED = re.compile(r"""['"]([^'"]*)['"]""")
_TYPE_NAMES = frozenset({"NoneType", "str", "int", "float", "bool", "list", "dict", "dict object", "list object"})
# What a template can raise on a client's data; RecursionError comes from nested tool schemas.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateRefusalError(BadRequestError):
    """A conversation that the template raises an error for."""


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt.

    `boundaries` ascend without repeats, 0 left out: the end of system messages and tools, then ends of messages.  The
    last may equal the prompt's length, where no generation prompt follows.  `turn_end` is the one before the generation
    prompt (and whatever the template puts behind it); 0 where unknown, as for completions.
    """

    tokens: TokenArray
    boundaries: list[int] = []
    turn_end: int = 0
    messages: list[MessageEnd] = []
    tail: str = ""  # text from `turn_end` on: the assistant's header, and the template's beginning of the answer
    tools: Tools = None  # in the prompt


class TemplateRenderer:
    """Renderer for any number of threads at once.

    `template_args` are arguments of a chat's template that a request does not set.  Raises ValueError where the
    template refuses them.  `parse_turn` parses sampled tokens as an answer; without it none are replayed.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        vocabulary_size: int | None = None,
        template_args: Mapping[str, Any] | None = None,
        parse_turn: TurnParser | None = None,
    ) -> None:
        self._wrapper = tokenizer
        self._tokenizer: Any = tokenizer._tokenizer  # the wrapper forwards no __call__
        self._vocabulary_size = vocabulary_size or len(tokenizer)
        self._text_tokenizer = TextTokenizer(self._tokenizer)
        self._message_ends = MessageEndCache()
        self._template_args = dict(template_args or {})
        self._template_source = _find_template_source(tokenizer)
        self.traits = TemplateTraits()
        if tokenizer.has_chat_template:
            self.traits = probe_template(self._template_source, self._render_probe)
        self._is_known_role = lru_cache(ROLES_CACHED_MAX)(self._probe_role)
        self._replayer = ToolCallReplayer(tokenizer, parse_turn) if parse_turn else None
        self._added_tokens = tuple(self._tokenizer.get_added_vocab())
        # Some put a space before any text, so that a piece by itself has other tokens than within a text.
        self._can_split_anywhere = self._tokenizer.convert_ids_to_tokens(self._text_tokenizer.encode("x")) == ["x"]
        if self._template_args:
            self._check_template_args()

    def tokenize_prediction(self, text: str, check: Callable[[], None]) -> TokenArray:
        """Token ids of a text that is only expected.  Raises what `check` raises, once nobody waits for it."""
        return self._text_tokenizer.tokenize_in_pieces(replace_halves(text), check)

    def clear_cache(self) -> None:
        """Drop the texts that were tokenized, their messages' ends, and the answers that were parsed."""
        self._text_tokenizer.clear_cache()
        self._message_ends.clear()
        if self._replayer is not None:
            self._replayer.clear_cache()

    def _check_template_args(self) -> None:
        """Raise ValueError where a greeting is rendered without them and not with them."""
        setting = f"--chat-template-args {json.dumps(self._template_args, ensure_ascii=False)}"
        if not self._wrapper.has_chat_template:
            log.warning("%s: has no effect, this model has no chat template", setting)
            return
        greeting = self._parse_conversation({"messages": [{"role": "user", "content": "hello"}]})
        try:
            self._render_messages(greeting, greeting.messages, generation_prompt=True)
        except _TEMPLATE_ERRORS as error:
            if self._render_prefix(msgspec.structs.replace(greeting, kwargs={}), greeting.messages):
                detail = _format_template_error(error, self._template_source)
                raise ValueError(f"{setting}: the model's chat template refuses this: {detail}") from error

    def _parse_conversation(self, body: dict[str, Any]) -> ChatConversation:
        return parse_conversation(body, traits=self.traits, template_args=self._template_args)

    def _render_probe(self, messages: list[Message], tools: Tools, **arguments: Any) -> str:
        with suppress(*_TEMPLATE_ERRORS):
            return self._apply_template(messages, tools, self._template_args | arguments, generation_prompt=True)
        return ""

    def _refuse_unknown_roles(self, conversation: ChatConversation) -> None:
        """Refuse unusual roles that the template does not mention, or messages of which it leaves out."""
        for item in conversation.items:
            if item.role not in ROLES and not self._is_known_role(item.role):
                role, advice = item.role[:ROLE_CHARS_MAX], f"send {', '.join(ROLES[:-1])} or {ROLES[-1]}"
                fault = f'is "{role}", a role that the model\'s chat template does not know; {advice}'
                raise FieldError(f"messages[{item.number - 1}].role", fault)

    def _probe_role(self, role: str) -> bool:
        """True for a role that the template mentions and shows the messages of."""
        marker = "warmlinerole"
        probe = [{"role": "user", "content": "a"}, {"role": role, "content": marker}]
        return is_quoted(role, self._template_source) and marker in self._render_probe(probe, None)

    def render(
        self,
        endpoint: str,
        body: object,
        turns: Sequence[SampledTurn] = (),
        limits: RenderLimits | None = None,
        root: bytes = b"",
    ) -> RenderedPrompt:
        """Render a "chat" or "completion" body.  Raises BadRequestError, PromptTooLongError, RenderCancelledError.

        `turns`: sampled answers, to be replayed token by token where the body still has them.  `root`: namespace of the
        prompts whose tokens are taken where this one begins as they did.
        """
        if not isinstance(body, dict):
            raise BadRequestError("the body must be a JSON object")
        limits = limits or RenderLimits()
        chat = endpoint == "chat"
        rendered = self._render_chat(body, turns, limits, root) if chat else self._render_completion(body, limits, root)
        if not rendered.tokens:
            raise BadRequestError("the prompt is empty", "messages" if chat else "prompt")
        return rendered

    def _render_completion(self, body: dict[str, Any], limits: RenderLimits, root: bytes) -> RenderedPrompt:
        prompt = body.get("prompt")
        if prompt is None and (hint := explain_missing_field("prompt", body)):
            raise FieldError("prompt", hint)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            tokens, _ = self._text_tokenizer.tokenize(replace_halves(prompt), limits, root, add_special_tokens=True)
            return RenderedPrompt(tokens=tokens)
        if isinstance(prompt, list):
            limits.check_ids(len(prompt))
        ids = _parse_token_ids(prompt)
        if not ids:
            raise FieldError("prompt", "is empty")
        if min(ids) < 0 or max(ids) >= self._vocabulary_size:
            raise FieldError("prompt", f"has token ids outside 0 to {self._vocabulary_size - 1}")
        return RenderedPrompt(tokens=TokenArray(ids))

    def _render_chat(
        self, body: dict[str, Any], turns: Sequence[SampledTurn], limits: RenderLimits, root: bytes
    ) -> RenderedPrompt:
        if not self._wrapper.has_chat_template:
            raise BadRequestError("this model has no chat template; use /v1/completions", "messages")
        conversation = self._parse_conversation(body)
        self._refuse_unknown_roles(conversation)
        try:
            rendered, (tokens, token_at) = self._render_and_tokenize(conversation, turns, limits, root)
        except TemplateRefusalError:
            if (completed := self._complete_tools(conversation)) is None:
                raise
            conversation = completed
            rendered, (tokens, token_at) = self._render_and_tokenize(conversation, turns, limits, root)
        ends, turn_end = rendered.find_message_ends(), rendered.turn_end
        boundaries = {token_at(end) for end in (*ends.values(), turn_end)}
        ends = rendered.find_rewritten_ends(ends) | ends | {len(conversation.complete_items): turn_end}
        return RenderedPrompt(
            tokens=tokens,
            boundaries=sorted(boundaries - {0}),
            turn_end=token_at(turn_end),
            messages=[item for item in self._list_message_ends(rendered, ends, token_at) if item.end],
            tail=rendered.tail,
            tools=conversation.offered_tools,
        )

    def _complete_tools(self, conversation: ChatConversation) -> ChatConversation | None:
        """Complete tools that the template refuses by themselves; None where its error has another reason.

        Raises FieldError for a tool that stays refused.
        """
        talk = [{"role": "user", "content": "a"}]

        def find_error(*tools: dict[str, Any]) -> Exception | None:
            try:
                self._apply_template(talk, list(tools) or None, conversation.kwargs, generation_prompt=True)
            except _TEMPLATE_ERRORS as error:
                return error
            return None

        if not conversation.tools or find_error() or not find_error(*conversation.tools):
            return None
        completed = []
        for index, tool in enumerate(conversation.tools):
            if (rendered := complete_tool(tool, lambda form: find_error(form) is None)) is None:
                name, error = quote_text(tool["function"]["name"]), find_error(tool)
                detail = _format_template_error(error, self._template_source) if error else ""
                raise FieldError(f"tools[{index}]", f"({name}) is refused by the model's chat template: {detail}")
            completed.append(rendered)
        return msgspec.structs.replace(conversation, tools=completed)

    def _render_and_tokenize(
        self, conversation: ChatConversation, turns: Sequence[SampledTurn], limits: RenderLimits, root: bytes
    ) -> tuple[RenderedConversation, Tokens]:
        can_replay = turns and self._text_tokenizer.has_offsets
        if can_replay and (replayed := self._replay_turns(conversation, turns, limits, root)):
            return replayed
        rendered = self._render_conversation(conversation, limits, root)
        return rendered, self._text_tokenizer.tokenize(rendered.text, limits, root)

    def _replay_turns(
        self, conversation: ChatConversation, turns: Sequence[SampledTurn], limits: RenderLimits, root: bytes
    ) -> tuple[RenderedConversation, Tokens] | None:
        """The conversation with placeholders, and the tokens in their place; None without a turn to replay."""
        if self._replayer is None:
            return None
        sampled = self._replayer.find_sampled_tokens(conversation, turns)

        def tokenize(text: str, tokens_before: int) -> Tokens:
            return self._text_tokenizer.tokenize(text, limits, root, tokens_before=tokens_before)

        for _ in range(REPLAY_ATTEMPTS_MAX):
            if not sampled:
                break
            marked = self._replayer.mark_conversation(conversation, sampled)
            rendered = self._render_conversation(marked.conversation, limits, root)
            spans, doubtful = self._replayer.find_spans(marked, rendered.text, rendered.tail)
            doubtful |= {span.message_index for span in spans if not self._can_split_at(rendered.text, span.end)}
            if not doubtful:
                return rendered, splice_tokens(rendered.text, spans, marked, tokenize)
            sampled = {index: tokens for index, tokens in sampled.items() if index not in doubtful}
        return None

    def _can_split_at(self, text: str, offset: int) -> bool:
        """True where the text after `offset` becomes the same tokens by itself."""
        return self._can_split_anywhere or offset == len(text) or text.startswith(self._added_tokens, offset)

    def _render_conversation(
        self, conversation: ChatConversation, limits: RenderLimits, root: bytes
    ) -> RenderedConversation:
        options = {"continue_final_message": True} if conversation.continue_final else {}
        try:
            text = self._render_messages(conversation, conversation.messages, conversation.generation_prompt, **options)
        except _TEMPLATE_ERRORS as error:
            arguments = _format_kwargs(conversation.kwargs)
            detail = _format_template_error(error, self._template_source)
            fault = f"the model's chat template refuses these messages{arguments}: {detail}"
            raise TemplateRefusalError(fault, "messages") from error

        def render_prefix(messages: list[Message]) -> str:
            limits.cancellation.check()
            return self._render_prefix(conversation, messages)

        return RenderedConversation(conversation, text, render_prefix, self._message_ends, root)

    def _render_messages(
        self, conversation: ChatConversation, messages: list[Message], generation_prompt: bool, **options: object
    ) -> str:
        return self._apply_template(messages, conversation.tools, conversation.kwargs | options, generation_prompt)

    def _apply_template(
        self, messages: list[Message], tools: Tools, kwargs: Mapping[str, Any], generation_prompt: bool
    ) -> str:
        with self._text_tokenizer.lock:
            options = {"tools": tools, "add_generation_prompt": generation_prompt, "tokenize": False, **kwargs}
            return replace_halves(str(self._wrapper.apply_chat_template(messages, **options)))

    def _render_prefix(self, conversation: ChatConversation, messages: list[Message]) -> str:
        """Render these messages alone; "" where the template refuses a conversation that ends there."""
        with suppress(*_TEMPLATE_ERRORS):
            return self._render_messages(conversation, messages, generation_prompt=False)
        return ""

    def _list_message_ends(
        self, rendered: RenderedConversation, ends: dict[int, int], token_at: Callable[[int], int]
    ) -> Iterator[MessageEnd]:
        """Known ends of messages, in their order, with notes on omissions."""
        conversation, text = rendered.conversation, rendered.text
        for count, end in sorted(ends.items()):
            item = conversation.items[count - 1] if count else None
            message: Message = item.message if item else {"role": "tools"}
            start = ends.get(count - 1, -1 if count > 1 else 0)
            note = self._explain_omission(conversation, message, text[start:end]) if start >= 0 else ""
            role = message["role"][:ROLE_CHARS_MAX]
            role = role if is_field_name(role) else PLACEHOLDER
            yield MessageEnd(end=token_at(end), number=item.number if item else 0, role=role, note=note)

    def _explain_omission(self, conversation: ChatConversation, message: Message, rendered: str) -> str:
        if message["role"] != "assistant" or not self._wrapper.has_thinking:
            return ""
        if reasoning := extract_reasoning(message, self._wrapper.think_start, self._wrapper.think_end):
            return "" if reasoning in rendered else "the template leaves out its reasoning"
        return "it came without reasoning" if conversation.kwargs.get("enable_thinking", True) else ""


def _parse_token_ids(prompt: object) -> list[int]:
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return prompt
        ids = [token for entry in prompt if (token := convert_integer(entry)) is not None]
        if len(ids) == len(prompt):
            return ids
    raise FieldError("prompt", "must be a non-empty string, token ids, or a list of such prompts")


def _find_template_source(tokenizer: TokenizerWrapper) -> str:
    """Text of the template, or of the code that renders in its place."""
    custom = tokenizer._chat_template or type(tokenizer._tokenizer).apply_chat_template
    if custom is PreTrainedTokenizerBase.apply_chat_template:
        return str(tokenizer._tokenizer.chat_template or "")
    try:
        module = inspect.getmodule(custom)
        return inspect.getsource(module) if module else ""
    except (OSError, TypeError):  # frozen, or native
        return ""


def _format_template_error(error: Exception, source: str) -> str:
    """Format a template's error, as far as the words are its own: others may be a message's."""
    detail = str(error)[:_ERROR_CHARS_MAX]
    own = detail[: bisect_left(range(1, len(detail) + 1), True, key=lambda length: detail[:length] not in source)]
    if own and own == detail:
        return detail
    if isinstance(error, UndefinedError | TypeError):  # Jinja's and Python's words, about names and types
        return _QUOTED.sub(
            lambda quoted: quoted[0] if quoted[1] in source or quoted[1] in _TYPE_NAMES else PLACEHOLDER, detail
        )
    return f"{own.rstrip()} {PLACEHOLDER}" if len(own) >= _TEMPLATE_TEXT_CHARS_MIN else type(error).__name__


def _format_kwargs(kwargs: dict[str, Any]) -> str:
    """Format a template's arguments for an error message."""
    if not kwargs:
        return ""
    short = {name[:_VALUE_CHARS_MAX]: _shorten_value(value) for name, value in kwargs.items()}
    return f" with the arguments {json.dumps(short, ensure_ascii=False)[:_ERROR_CHARS_MAX]}"


def _shorten_value(value: object) -> object:
    """Return a short value, or the type of a long one."""
    return value if len(json.dumps(value, ensure_ascii=False)) <= _VALUE_CHARS_MAX else format_json_type(value)
