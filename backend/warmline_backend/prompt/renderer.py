"""Bodies to token ids: rendered and tokenized once, with the offsets at which a later prompt may part ways.

A boundary is a token offset: so many tokens lie wholly inside the text up to the end of a message (`boundaries`).
Where a message ends that the template has rewritten since is told nevertheless, for people: to explain a difference.
"""

import inspect
import json
import logging
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import msgspec
from jinja2 import TemplateError, UndefinedError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from warmline_backend.prompt.boundaries import Boundaries
from warmline_backend.prompt.messages import ROLES, Conversation, read_conversation, reasoning_of
from warmline_backend.prompt.replay import ReadTurn, Replayer, spliced
from warmline_backend.prompt.template_traits import Message, Traits, is_spelled_out, traits_of
from warmline_backend.request.params import BadRequest, kind_of
from warmline_common.process.redaction import HIDDEN, is_name
from warmline_common.protocol.messages import MessageEnd, SampledTurn

log = logging.getLogger(__name__)

REPLAYS_TRIED_MAX = 3  # each without the messages of which the last one was in doubt
ROLES_REMEMBERED_MAX = 64  # that clients invented
ROLE_CHARS_MAX = 16  # a client may call itself anything; this much is told of it
_ERROR_CHARS_MAX = 500
_SHOWN_CHARS_MAX = 40  # of a value, or of a name, in an error message
_OWN_CHARS_MIN = 8  # of what a template says by itself, to mean something
_QUOTED = re.compile(r"""['"]([^'"]*)['"]""")
_TYPES = frozenset({"NoneType", "str", "int", "float", "bool", "list", "dict", "dict object", "list object"})
# What a template can raise on a client's data; RecursionError comes from nested tool schemas.
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt.

    `boundaries` ascend without repeats, 0 left out: the end of system messages and tools, then ends of messages.  The
    last may equal the prompt's length, where no generation prompt follows.  `turn_end` is the one before the generation
    prompt (and whatever the template puts behind it); 0 where unknown, as for completions.
    """

    tokens: list[int]
    boundaries: list[int]
    turn_end: int
    messages: list[MessageEnd] = []
    tail: str = ""  # the text from `turn_end` on: the assistant's header, and what the template opens its answer with
    tools: list[dict[str, Any]] | None = None  # that the model was told of


class Renderer:
    """Renders for any number of threads at once.

    Hugging Face's fast tokenizers may be shared by threads as long as nobody changes truncation, padding or special
    token settings: they do so themselves, lazily, in a first call, which is made here.  Slow ones get a lock.

    `template_args` are what a chat's template is given besides its messages, where a request doesn't say otherwise.
    Raises ValueError where the template can't do with them.  `read_turn` reads sampled tokens as an answer; without it
    none are put back.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        vocabulary_size: int | None = None,
        template_args: Mapping[str, Any] | None = None,
        read_turn: ReadTurn | None = None,
    ) -> None:
        self._wrapper = tokenizer
        self._tokenizer: Any = tokenizer._tokenizer  # the wrapper forwards no __call__
        self._vocabulary_size = vocabulary_size or len(tokenizer)
        fast = bool(self._tokenizer.is_fast)
        # Some legacy classes rewrite the text in `encode` alone; offsets are then offsets into another text.
        self._has_offsets = fast and type(self._tokenizer).encode is PreTrainedTokenizerBase.encode
        self._lock = nullcontext() if fast else threading.Lock()
        self._tokenize("a", add_special_tokens=False)
        self._template_args = dict(template_args or {})
        self._source = _source_of(tokenizer)
        self.traits = traits_of(self._source, self._probed) if tokenizer.has_chat_template else Traits()
        self._roles_shown: dict[str, bool] = {}
        self._replayer = Replayer(tokenizer, read_turn) if read_turn else None
        self._added = tuple(self._tokenizer.get_added_vocab())
        # Some put a space before whatever they are given, so that a piece by itself is not what it is in a text.
        self._splits_anywhere = self._tokenizer.convert_ids_to_tokens(self._plain("x")) == ["x"]
        if self._template_args:
            self._check_template_args()

    def _check_template_args(self) -> None:
        """Raises ValueError where a greeting is rendered without them and not with them."""
        shown = f"--chat-template-args {json.dumps(self._template_args, ensure_ascii=False)}"
        if not self._wrapper.has_chat_template:
            log.warning("%s: has no effect, this model has no chat template", shown)
            return
        greeting = self._conversation({"messages": [{"role": "user", "content": "hello"}]})
        try:
            self._template(greeting, greeting.messages, generation_prompt=True)
        except _TEMPLATE_FAULTS as error:
            if self._prefix(msgspec.structs.replace(greeting, kwargs={}), greeting.messages):
                detail = _detail(error, self._source)
                raise ValueError(f"{shown}: the model's chat template refuses this: {detail}") from error

    def _conversation(self, body: dict[str, Any]) -> Conversation:
        return read_conversation(body, traits=self.traits, source=self._source, template_args=self._template_args)

    def _probed(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        try:
            return self._rendered(messages, tools, self._template_args, generation_prompt=True)
        except _TEMPLATE_FAULTS:
            return ""

    def _refuse_hidden(self, conversation: Conversation) -> None:
        """Roles that only some models know, where the template doesn't speak of them, or leaves such messages out."""
        for item in conversation.items:
            if item.role not in ROLES and not self._is_known(item.role):
                where = f"messages[{item.number - 1}].role"
                raise BadRequest(
                    f"'{where}' is \"{item.role[:ROLE_CHARS_MAX]}\", a role that the model's chat template does not "
                    f"know; send {', '.join(ROLES[:-1])} or {ROLES[-1]}",
                    where,
                )

    def _is_known(self, role: str) -> bool:
        if (shown := self._roles_shown.get(role)) is None:
            marker = "warmlinerole"
            told = [{"role": "user", "content": "a"}, {"role": role, "content": marker}]
            shown = is_spelled_out(role, self._source) and marker in self._probed(told, None)
            if len(self._roles_shown) < ROLES_REMEMBERED_MAX:
                self._roles_shown[role] = shown
        return shown

    def render(self, endpoint: str, body: object, turns: Sequence[SampledTurn] = ()) -> Rendered:
        """The prompt of a "chat" or "completion" body.  Raises BadRequest.

        `turns`: answers that were sampled here, to stand as they were where the body still says the same.
        """
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        rendered = self._chat(body, turns) if endpoint == "chat" else self._completion(body)
        if not rendered.tokens:
            raise BadRequest("the prompt is empty", "messages" if endpoint == "chat" else "prompt")
        return rendered

    def _completion(self, body: dict[str, Any]) -> Rendered:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            _require_unicode(prompt, "prompt")
            tokens, _ = self._tokenize(prompt, add_special_tokens=True)
        else:
            tokens = self._token_ids(prompt)
        return Rendered(tokens=tokens, boundaries=[], turn_end=0)

    def _token_ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise BadRequest("'prompt' must be a non-empty string, token ids, or a list of such prompts", "prompt")
        if not prompt:
            raise BadRequest("'prompt' is empty", "prompt")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary_size:
            raise BadRequest(f"'prompt' has token ids outside 0 to {self._vocabulary_size - 1}", "prompt")
        return prompt

    def _chat(self, body: dict[str, Any], turns: Sequence[SampledTurn]) -> Rendered:
        if not self._wrapper.has_chat_template:
            raise BadRequest("this model has no chat template; use /v1/completions", "messages")
        conversation = self._conversation(body)
        self._refuse_hidden(conversation)
        replayed = self._replayed(conversation, turns) if turns and self._replayer and self._has_offsets else None
        if replayed:
            conversation, text, turn_end, tokens, token_at = replayed
        else:
            text = self._prompt_text(conversation)
            tokens, token_at = self._tokenize(text, add_special_tokens=False)
            turn_end = self._boundaries(conversation, text).turn_end()
        found = self._boundaries(conversation, text)
        ends = found.message_ends()
        boundaries = {token_at(end) for end in (*ends.values(), turn_end)}
        ends = found.rewritten_ends(ends) | ends | {len(conversation.closed): turn_end}
        return Rendered(
            tokens=tokens,
            boundaries=sorted(boundaries - {0}),
            turn_end=token_at(turn_end),
            messages=[message for message in self._told(conversation, text, ends, token_at) if message.end],
            tail=text[turn_end:] if turn_end else "",
            tools=conversation.offered,
        )

    def _replayed(
        self, original: Conversation, turns: Sequence[SampledTurn]
    ) -> tuple[Conversation, str, int, list[int], Callable[[int], int]] | None:
        """The marked conversation, its text and where its last turn ends, and what they are as tokens; None where there
        is nothing to put back.
        """
        assert self._replayer is not None
        marked = self._replayer.marked(original, turns)
        for _ in range(REPLAYS_TRIED_MAX):
            if not marked.turns:
                break
            conversation = marked.conversation
            text = self._prompt_text(conversation)
            turn_end = self._boundaries(conversation, text).turn_end()
            places, doubtful = self._replayer.places(marked, text, text[turn_end:] if turn_end else "")
            doubtful |= {place.message for place in places if not self._splits_at(text, place.end)}
            if not doubtful:
                tokens, token_at = spliced(text, places, marked, self._tokenize_piece)
                return conversation, text, turn_end, tokens, token_at
            marked = self._replayer.without(marked, original, doubtful)
        return None

    def _splits_at(self, text: str, offset: int) -> bool:
        """Whether what follows there becomes the same tokens by itself."""
        return self._splits_anywhere or offset == len(text) or text.startswith(self._added, offset)

    def _tokenize_piece(self, text: str) -> tuple[list[int], Callable[[int], int]]:
        return self._tokenize(text, add_special_tokens=False)

    def _prompt_text(self, conversation: Conversation) -> str:
        options = {"continue_final_message": True} if conversation.continue_final else {}
        try:
            text = self._template(conversation, conversation.messages, conversation.generation_prompt, **options)
        except _TEMPLATE_FAULTS as error:
            what = f"the model's chat template refuses these messages{_shown(conversation.kwargs)}"
            what = f"{what}: {_detail(error, self._source)}"
            raise BadRequest(what, "messages") from error
        _require_unicode(text, "messages")
        return text

    def _template(
        self, conversation: Conversation, messages: list[Message], generation_prompt: bool, **options: object
    ) -> str:
        return self._rendered(messages, conversation.tools, {**conversation.kwargs, **options}, generation_prompt)

    def _rendered(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        generation_prompt: bool,
    ) -> str:
        with self._lock:
            return str(
                self._wrapper.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False, **kwargs
                )
            )

    def _prefix(self, conversation: Conversation, messages: list[Message]) -> str:
        """These messages alone, or "" where the template refuses a conversation that ends there."""
        try:
            return self._template(conversation, messages, generation_prompt=False)
        except _TEMPLATE_FAULTS:
            return ""

    def _boundaries(self, conversation: Conversation, text: str) -> Boundaries:
        return Boundaries(conversation, text, partial(self._prefix, conversation))

    def _told(
        self, conversation: Conversation, text: str, ends: dict[int, int], token_at: Callable[[int], int]
    ) -> Iterator[MessageEnd]:
        """Messages whose ends are known, in their order, and what of them the text lacks."""
        for count, end in sorted(ends.items()):
            item = conversation.items[count - 1] if count else None
            message: Message = item.message if item else {"role": "tools"}
            start = ends.get(count - 1, -1 if count > 1 else 0)
            note = self._what_is_left_out(conversation, message, text[start:end]) if start >= 0 else ""
            number = item.number if item else 0
            role = message["role"][:ROLE_CHARS_MAX]
            yield MessageEnd(end=token_at(end), number=number, role=role if is_name(role) else HIDDEN, note=note)

    def _what_is_left_out(self, conversation: Conversation, message: Message, rendered: str) -> str:
        if message["role"] != "assistant" or not self._wrapper.has_thinking:
            return ""
        if reasoning := reasoning_of(message, self._wrapper.think_start, self._wrapper.think_end):
            return "" if reasoning in rendered else "the template leaves out its reasoning"
        return "it came without reasoning" if conversation.kwargs.get("enable_thinking", True) else ""

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], Callable[[int], int]]:
        """Token ids, and a function from a character offset to the number of tokens wholly before it."""
        if not self._has_offsets:
            return self._plain(text, add_special_tokens), lambda _: 0
        with self._lock:
            encoding = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).encodings[0]
        ids: list[int] = encoding.ids

        def token_at(offset: int) -> int:
            # Characters without a token (dropped by the tokenizer) belong to the next one.
            for position in range(offset, len(text)) if offset else ():
                if (token := encoding.char_to_token(position)) is not None:
                    return int(token)
            return len(ids) if offset else 0

        return ids, token_at

    def _plain(self, text: str, add_special_tokens: bool = False) -> list[int]:
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids


def _source_of(tokenizer: TokenizerWrapper) -> str:
    """The template's text, or the code that renders in its place."""
    custom = tokenizer._chat_template or type(tokenizer._tokenizer).apply_chat_template
    if custom is PreTrainedTokenizerBase.apply_chat_template:
        return str(tokenizer._tokenizer.chat_template or "")
    try:
        module = inspect.getmodule(custom)
        return inspect.getsource(module) if module else ""
    except (OSError, TypeError):  # frozen, or native
        return ""


def _detail(error: Exception, source: str) -> str:
    """What a template says of its conversation, as far as these are its own words: others may be a message's."""
    told = str(error)[:_ERROR_CHARS_MAX]
    own = told[: bisect_left(range(1, len(told) + 1), True, key=lambda length: told[:length] not in source)]
    if own and own == told:
        return told
    if isinstance(error, UndefinedError | TypeError):  # Jinja's and Python's words, about names and types
        return _QUOTED.sub(lambda quoted: quoted[0] if quoted[1] in source or quoted[1] in _TYPES else HIDDEN, told)
    return f"{own.rstrip()} {HIDDEN}" if len(own) >= _OWN_CHARS_MIN else type(error).__name__


def _shown(kwargs: dict[str, Any]) -> str:
    """A template's arguments, for an error message: which of them are the request's own is its client's to know."""
    if not kwargs:
        return ""
    short = {name[:_SHOWN_CHARS_MAX]: _in_short(value) for name, value in kwargs.items()}
    return f" with the arguments {json.dumps(short, ensure_ascii=False)[:_ERROR_CHARS_MAX]}"


def _in_short(value: object) -> object:
    """Itself, or what it is."""
    return value if len(json.dumps(value, ensure_ascii=False)) <= _SHOWN_CHARS_MAX else kind_of(value)


def _require_unicode(text: str, param: str) -> None:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"'{param}' has a lone surrogate at character {error.start}; it is no valid text", param
        ) from error
