"""Tables of body fields: supported, ignored, and unsupported with a hint.  Pure, but for TypoNotices.

    SUPPORTED_FIELDS    read here or by the proxy
    UNSUPPORTED_FIELDS  would change an answer elsewhere: refused with a hint, unless their value is off
    IGNORED_FIELDS      known to change nothing of an answer here

Agents send all sorts of fields, so any other is ignored; one that looks like a typo is logged once.
"""

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from warmline_common.process.redaction import is_field_name

log = logging.getLogger(__name__)

SUPPORTED_FIELDS = frozenset(
    {"model", "messages", "prompt", "n", "stream", "stream_options", "echo", "logprobs", "top_logprobs"}
    | {"max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"}
    | {"temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"}
    | {"presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_context_size"}
    | {"tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "grammar"}
    | {"json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    | {"reasoning_effort", "reasoning", "thinking", "enable_thinking", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message", "cache_prompt", "session_id", "prompt_cache_key"}
)
IGNORED_FIELDS = frozenset(
    {"user", "metadata", "store", "service_tier", "prediction", "verbosity", "safety_identifier", "models", "priority"}
    | {"prompt_cache_retention", "keep_alive", "timeout", "request_id", "id_slot", "slot_id", "cache_salt"}
    | {"reasoning_format", "include_reasoning", "separate_reasoning", "stream_reasoning", "thinking_budget", "provider"}
)
NAME_CHARS_MAX = 40  # no slip of a name that is served is longer
NAMES_MAX = 1000  # remembered; beyond, nothing more is logged
SIMILARITY_MIN = 0.8  # of two names, as difflib counts it


@dataclass(frozen=True)
class UnsupportedField:
    """A field of other servers."""

    hint: str  # the remedy
    is_off: Callable[[object], bool] = lambda value: not value  # whether this value changes nothing


def _off_if(*values: object) -> Callable[[object], bool]:
    """Make a check for one of `values`, null, 0 or false; true is not 1."""
    return lambda value: value in (None, 0) or (value is not True and value in values)


def _off_unless(value: bool) -> Callable[[object], bool]:
    return lambda given: given is not value


_MAX_TOKENS_ALIAS = UnsupportedField("send 'max_tokens'", _off_if(-1))
_NESTED_BODY = UnsupportedField("its fields belong into the body itself, beside 'model'")
_NO_BEAMS = "answers are sampled, or greedy; leave it out, or send 'n' for several"
_LOGITS_PROCESSORS = UnsupportedField("send 'logit_bias' or 'allowed_token_ids'")
_BAD_WORDS = UnsupportedField("send 'logit_bias', with -100 for each token that must not come")
_NO_SAMPLER = "this way of sampling is not there; leave it out, or send 'temperature', 'top_p', 'top_k' or 'min_p'"
_ADAPTER = UnsupportedField("an adapter is loaded with the model, when the server starts; leave it out")
_TOKEN_IDS_OUTPUT = UnsupportedField("tokens are told as text; leave it out")
_SYSTEM_PROMPT = UnsupportedField("send a message of the role system")

UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = {
    # other names or places of supported fields
    **dict.fromkeys(
        ("n_predict", "num_predict", "max_new_tokens", "max_length", "max_tokens_to_sample"), _MAX_TOKENS_ALIAS
    ),
    "max_output_tokens": UnsupportedField("send 'max_tokens', or 'max_output_tokens' to /v1/responses", _off_if(-1)),
    "min_new_tokens": UnsupportedField("send 'min_tokens'"),
    "stop_sequences": UnsupportedField("send 'stop', or 'stop_sequences' to /v1/messages"),
    "repeat_penalty": UnsupportedField("send 'repetition_penalty'", _off_if(1)),
    "n_probs": UnsupportedField("send 'logprobs' and 'top_logprobs', or in completions 'logprobs' as a number"),
    "format": UnsupportedField("send 'response_format'"),
    "regex": UnsupportedField("send 'structured_outputs' with \"regex\""),
    "ebnf": UnsupportedField("send 'grammar'"),
    "structural_tag": UnsupportedField("send 'tools'"),
    "grammar_lazy": UnsupportedField("send 'tools' with \"strict\": true"),
    "think": UnsupportedField("send 'thinking' or 'reasoning_effort'", lambda value: value is None),
    "extra_body": _NESTED_BODY,
    "options": _NESTED_BODY,
    # other ways to choose tokens
    "use_beam_search": UnsupportedField(_NO_BEAMS),
    "num_beams": UnsupportedField(_NO_BEAMS, _off_if(1)),
    "length_penalty": UnsupportedField("it belongs to beam search, which is not there; leave it out", _off_if(1)),
    "best_of": UnsupportedField("leave it out or send 1; for several answers send 'n'", _off_if(1)),
    "logits_processors": _LOGITS_PROCESSORS,
    "custom_logit_processor": _LOGITS_PROCESSORS,
    "bad_words": _BAD_WORDS,
    "bad_words_ids": _BAD_WORDS,
    **dict.fromkeys(("samplers", "sampler_seq", "mirostat", "mirostat_mode", "top_a"), UnsupportedField(_NO_SAMPLER)),
    **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier"), UnsupportedField(_NO_SAMPLER)),
    **dict.fromkeys(("typical_p", "typ_p", "tfs_z"), UnsupportedField(_NO_SAMPLER, _off_if(1))),
    "top_n_sigma": UnsupportedField(_NO_SAMPLER, _off_if(-1)),
    # another prompt, or another model
    "chat_template": UnsupportedField("the model's own template is used; leave it out, or send 'chat_template_kwargs'"),
    "documents": UnsupportedField("send their text in a message"),
    "truncate_prompt_tokens": UnsupportedField("prompts are not cut; leave it out, and shorten the prompt", _off_if()),
    "prompt_embeds": UnsupportedField("send 'prompt' as text or token ids"),
    **dict.fromkeys(("lora", "lora_path", "adapters", "adapter_id"), _ADAPTER),
    # answers of other kinds
    "suffix": UnsupportedField("leave it out; nothing is filled in between two texts"),
    "prompt_logprobs": UnsupportedField("a prompt's own log-probabilities are not computed; leave it out", _off_if()),
    "return_tokens_as_token_ids": _TOKEN_IDS_OUTPUT,
    "return_token_ids": _TOKEN_IDS_OUTPUT,
    "include_stop_str_in_output": UnsupportedField("an answer ends before its stop word; leave it out"),
    "web_search_options": UnsupportedField(
        "nothing is searched here; leave it out, or send a tool of your own", _off_if()
    ),
}
UNSUPPORTED_FIELDS_BY_ENDPOINT: Mapping[str, Mapping[str, UnsupportedField]] = {
    "chat": {
        "functions": UnsupportedField("send 'tools'"),
        "function_call": UnsupportedField("send 'tools' and 'tool_choice'", _off_if("none", "auto")),
        "system": _SYSTEM_PROMPT,
        "instructions": _SYSTEM_PROMPT,
        "input": UnsupportedField("send 'messages', or 'input' to /v1/responses"),
        "prompt": UnsupportedField("send 'messages' alone, or 'prompt' to /v1/completions"),
        "echo": UnsupportedField("leave it out, or send it to /v1/completions"),
        "add_special_tokens": UnsupportedField("the template writes them; leave it out", _off_unless(True)),
        "skip_special_tokens": UnsupportedField(
            "special tokens are read, and not told; leave it out", _off_unless(False)
        ),
        "modalities": UnsupportedField('answers are text; leave it out or send ["text"]', _off_if([], ["text"])),
        "audio": UnsupportedField("answers are text; leave it out", _off_if()),
    },
    "completion": {
        "messages": UnsupportedField("send 'prompt' alone, or 'messages' to /v1/chat/completions"),
        "tools": UnsupportedField("send them to /v1/chat/completions"),
        "top_logprobs": UnsupportedField("send 'logprobs' as a number"),
        "add_special_tokens": UnsupportedField("leave it out, or send the prompt as token ids", _off_unless(False)),
    },
}
_KNOWN_NAMES = (SUPPORTED_FIELDS | IGNORED_FIELDS).union(UNSUPPORTED_FIELDS, *UNSUPPORTED_FIELDS_BY_ENDPOINT.values())


def find_unsupported_field(endpoint: str, body: Mapping[str, object]) -> tuple[str, str] | None:
    """Find the first field that would change the answer elsewhere and can't here, and its hint."""
    here = UNSUPPORTED_FIELDS_BY_ENDPOINT[endpoint]
    for name, value in body.items():
        foreign = here.get(name) or UNSUPPORTED_FIELDS.get(name)
        if foreign is not None and not foreign.is_off(value):
            return name, foreign.hint
    return None


def suggest_field(name: str) -> str | None:
    """Suggest the supported field that `name` resembles; None for a known name or one that resembles none."""
    if name in _KNOWN_NAMES or not is_field_name(name):
        return None
    near = difflib.get_close_matches(_normalize_name(name), _NORMALIZED_NAMES, n=1, cutoff=SIMILARITY_MIN)
    return _NORMALIZED_NAMES[near[0]] if near else None


def _normalize_name(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_NORMALIZED_NAMES = {_normalize_name(name): name for name in sorted(SUPPORTED_FIELDS)}


class TypoNotices:
    """Log of field names that look misspelt, each once.  One thread."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def log_typos(self, body: Mapping[str, object]) -> None:
        for name in sorted(body.keys() - _KNOWN_NAMES - self._seen):
            if len(name) > NAME_CHARS_MAX or len(self._seen) >= NAMES_MAX:
                continue
            self._seen.add(name)
            if meant := suggest_field(name):
                log.warning("request field '%s' is not known and has no effect; did you mean '%s'?", name, meant)
