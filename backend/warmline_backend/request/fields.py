"""Which of a body's fields mean something here, and what is said of the others.  Pure, but for `Slips`.

    SERVED    read here or by the proxy
    FOREIGN   would change an answer elsewhere and can't here: refused, with what to send instead, unless they are off
    UNHEARD   known to change nothing of an answer here

Agents send all sorts of fields, so any other is ignored; one that looks like a slip of the pen is told of, once.
"""

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from warmline_common.process.redaction import is_name

log = logging.getLogger(__name__)

SERVED = frozenset(
    {"model", "messages", "prompt", "n", "stream", "stream_options", "echo", "logprobs", "top_logprobs"}
    | {"max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"}
    | {"temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"}
    | {"presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_context_size"}
    | {"tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "grammar"}
    | {"json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    | {"reasoning_effort", "reasoning", "thinking", "enable_thinking", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message", "cache_prompt", "session_id", "prompt_cache_key"}
)
UNHEARD = frozenset(
    {"user", "metadata", "store", "service_tier", "prediction", "verbosity", "safety_identifier", "models", "priority"}
    | {"prompt_cache_retention", "keep_alive", "timeout", "request_id", "id_slot", "slot_id", "cache_salt"}
    | {"reasoning_format", "include_reasoning", "separate_reasoning", "stream_reasoning", "thinking_budget", "provider"}
)
NAME_CHARS_MAX = 40  # no slip of a name that is served is longer
NAMES_MAX = 1000  # that are remembered; beyond, nothing more is said
LIKENESS_MIN = 0.8  # of two names, as difflib counts it


@dataclass(frozen=True)
class Foreign:
    """A field of other servers."""

    instead: str  # what to do instead
    off: Callable[[object], bool] = lambda value: not value  # whether this value changes nothing


def _is(*values: object) -> Callable[[object], bool]:
    """One of these, or null, 0 or false; true is not 1."""
    return lambda value: value in (None, 0) or (value is not True and value in values)


def _unless(value: bool) -> Callable[[object], bool]:
    return lambda given: given is not value


_LENGTH = Foreign("send 'max_tokens'", _is(-1))
_OUTER = Foreign("its fields belong into the body itself, beside 'model'")
_NO_BEAMS = "answers are sampled, or greedy; leave it out, or send 'n' for several"
_PROCESSORS = Foreign("send 'logit_bias' or 'allowed_token_ids'")
_BAD_WORDS = Foreign("send 'logit_bias', with -100 for each token that must not come")
_NO_SAMPLER = "this way of sampling is not there; leave it out, or send 'temperature', 'top_p', 'top_k' or 'min_p'"
_ADAPTER = Foreign("an adapter is loaded with the model, when the server starts; leave it out")
_AS_TEXT = Foreign("tokens are told as text; leave it out")
_INSTRUCTION = Foreign("send a message of the role system")

FOREIGN: Mapping[str, Foreign] = {
    # another name, or another place, of what is served
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length", "max_tokens_to_sample"), _LENGTH),
    "max_output_tokens": Foreign("send 'max_tokens', or 'max_output_tokens' to /v1/responses", _is(-1)),
    "min_new_tokens": Foreign("send 'min_tokens'"),
    "stop_sequences": Foreign("send 'stop', or 'stop_sequences' to /v1/messages"),
    "repeat_penalty": Foreign("send 'repetition_penalty'", _is(1)),
    "n_probs": Foreign("send 'logprobs' and 'top_logprobs', or in completions 'logprobs' as a number"),
    "format": Foreign("send 'response_format'"),
    "regex": Foreign("send 'structured_outputs' with \"regex\""),
    "ebnf": Foreign("send 'grammar'"),
    "structural_tag": Foreign("send 'tools'"),
    "grammar_lazy": Foreign("send 'tools' with \"strict\": true"),
    "think": Foreign("send 'thinking' or 'reasoning_effort'", lambda value: value is None),
    "extra_body": _OUTER,
    "options": _OUTER,
    # other ways to choose tokens
    "use_beam_search": Foreign(_NO_BEAMS),
    "num_beams": Foreign(_NO_BEAMS, _is(1)),
    "length_penalty": Foreign("it belongs to beam search, which is not there; leave it out", _is(1)),
    "best_of": Foreign("leave it out or send 1; for several answers send 'n'", _is(1)),
    "logits_processors": _PROCESSORS,
    "custom_logit_processor": _PROCESSORS,
    "bad_words": _BAD_WORDS,
    "bad_words_ids": _BAD_WORDS,
    **dict.fromkeys(("samplers", "sampler_seq", "mirostat", "mirostat_mode", "top_a"), Foreign(_NO_SAMPLER)),
    **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier"), Foreign(_NO_SAMPLER)),
    **dict.fromkeys(("typical_p", "typ_p", "tfs_z"), Foreign(_NO_SAMPLER, _is(1))),
    "top_n_sigma": Foreign(_NO_SAMPLER, _is(-1)),
    # another prompt, or another model
    "chat_template": Foreign("the model's own template is used; leave it out, or send 'chat_template_kwargs'"),
    "documents": Foreign("send their text in a message"),
    "truncate_prompt_tokens": Foreign("prompts are not cut; leave it out, and shorten the prompt", _is()),
    "prompt_embeds": Foreign("send 'prompt' as text or token ids"),
    **dict.fromkeys(("lora", "lora_path", "adapters", "adapter_id"), _ADAPTER),
    # more, or something else, than answers have here
    "suffix": Foreign("leave it out; nothing is filled in between two texts"),
    "prompt_logprobs": Foreign("a prompt's own log-probabilities are not computed; leave it out", _is()),
    "return_tokens_as_token_ids": _AS_TEXT,
    "return_token_ids": _AS_TEXT,
    "include_stop_str_in_output": Foreign("an answer ends before its stop word; leave it out"),
    "web_search_options": Foreign("nothing is searched here; leave it out, or send a tool of your own", _is()),
}
FOREIGN_IN: Mapping[str, Mapping[str, Foreign]] = {
    "chat": {
        "functions": Foreign("send 'tools'"),
        "function_call": Foreign("send 'tools' and 'tool_choice'", _is("none", "auto")),
        "system": _INSTRUCTION,
        "instructions": _INSTRUCTION,
        "input": Foreign("send 'messages', or 'input' to /v1/responses"),
        "prompt": Foreign("send 'messages' alone, or 'prompt' to /v1/completions"),
        "echo": Foreign("leave it out, or send it to /v1/completions"),
        "add_special_tokens": Foreign("the template writes them; leave it out", _unless(True)),
        "skip_special_tokens": Foreign("special tokens are read, and not told; leave it out", _unless(False)),
        "modalities": Foreign('answers are text; leave it out or send ["text"]', _is([], ["text"])),
        "audio": Foreign("answers are text; leave it out", _is()),
    },
    "completion": {
        "messages": Foreign("send 'prompt' alone, or 'messages' to /v1/chat/completions"),
        "tools": Foreign("send them to /v1/chat/completions"),
        "top_logprobs": Foreign("send 'logprobs' as a number"),
        "add_special_tokens": Foreign("leave it out, or send the prompt as token ids", _unless(False)),
    },
}
_FOREIGN_NAMES = FOREIGN.keys() | FOREIGN_IN["chat"].keys() | FOREIGN_IN["completion"].keys()
_KNOWN = SERVED | UNHEARD | _FOREIGN_NAMES


def refused_in(endpoint: str, body: Mapping[str, object]) -> tuple[str, str] | None:
    """The first field that would change the answer elsewhere and can't here, and what to do instead."""
    here = FOREIGN_IN[endpoint]
    for name, value in body.items():
        foreign = here.get(name) or FOREIGN.get(name)
        if foreign is not None and not foreign.off(value):
            return name, foreign.instead
    return None


def meant_by(name: str) -> str | None:
    """The field that is served whose name this nearly is; None where it is known itself, or like none."""
    if name in _KNOWN or not is_name(name):
        return None
    near = difflib.get_close_matches(_spelled(name), _SPELLINGS, n=1, cutoff=LIKENESS_MIN)
    return _SPELLINGS[near[0]] if near else None


def _spelled(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_SPELLINGS = {_spelled(name): name for name in sorted(SERVED)}


class Slips:
    """Tells in the log of names that look misspelt, each once.  One thread."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def tell(self, body: Mapping[str, object]) -> None:
        for name in sorted(body.keys() - _KNOWN - self._seen):
            if len(name) > NAME_CHARS_MAX or len(self._seen) >= NAMES_MAX:
                continue
            self._seen.add(name)
            if meant := meant_by(name):
                log.warning("request field '%s' is not known and has no effect; did you mean '%s'?", name, meant)
