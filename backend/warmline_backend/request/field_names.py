"""Tables of body fields: supported, ignored, and unsupported with a hint.  Pure, but for TypoNotices.

    SUPPORTED_FIELDS    read here or by the proxy
    UNSUPPORTED_FIELDS  would change an answer elsewhere: refused with a hint, unless their value is off
    IGNORED_FIELDS      known to change nothing of an answer here

Agents send all sorts of fields, so any other is ignored; one that looks like a typo is logged once.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from warmline_common.process.redaction import is_field_name
from warmline_common.protocol.misspelling import NAMES_COMPARED_MAX, find_similar

log = logging.getLogger(__name__)

SUPPORTED_FIELDS = frozenset(
    {"model", "messages", "prompt", "n", "stream", "stream_options", "echo", "logprobs", "top_logprobs"}
    | {"max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"}
    | {"temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"}
    | {"presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_context_size"}
    | {"tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "grammar", "prediction"}
    | {"json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    | {"reasoning_effort", "reasoning", "thinking", "think", "enable_thinking", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message", "cache_prompt", "session_id", "prompt_cache_key"}
)
IGNORED_FIELDS = frozenset(
    {"user", "metadata", "store", "service_tier", "verbosity", "safety_identifier", "models", "priority"}
    | {"prompt_cache_retention", "keep_alive", "timeout", "request_id", "id_slot", "slot_id", "cache_salt"}
    | {"reasoning_format", "include_reasoning", "separate_reasoning", "stream_reasoning", "thinking_budget", "provider"}
)
NAME_CHARS_MAX = 40  # no slip of a name that is served is longer
NAMES_MAX = 1000  # remembered; beyond, nothing more is logged
# Fields that endpoints answer.
ENDPOINT_FIELDS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/responses"}


@dataclass(frozen=True)
class UnsupportedField:
    """A field of other servers, or several of one kind."""

    names: str  # with spaces between them
    hint: str  # the remedy
    is_off: Callable[[object], bool] = lambda value: not value  # whether this value changes nothing


def _off_if(*values: object) -> Callable[[object], bool]:
    """Make a check for one of `values`, null, 0 or false; true is not 1."""
    return lambda value: value in (None, 0) or (value is not True and value in values)


def _off_unless(value: bool) -> Callable[[object], bool]:
    return lambda given: given is not value


def _index_fields(*fields: UnsupportedField) -> dict[str, UnsupportedField]:
    return {name: field for field in fields for name in field.names.split()}


_NO_BEAMS = "answers are sampled, or greedy; leave it out, or send 'n' for several"
_NO_SAMPLER = "this way of sampling is not there; leave it out, or send 'temperature', 'top_p', 'top_k' or 'min_p'"
_NO_ADAPTER = "an adapter is loaded with the model, when the server starts; leave it out"
_NO_SEARCH = "nothing is searched here; leave it out, or send a tool of your own"
_NO_SPECIAL_TOKENS = "special tokens are never part of the text; leave it out"
_OWN_TEMPLATE = "the model's own template is used; leave it out, or send 'chat_template_kwargs'"
_MAX_TOKENS_ALIASES = "n_predict num_predict max_new_tokens max_length max_tokens_to_sample"

UNSUPPORTED_FIELDS = _index_fields(
    # other names or places of supported fields
    UnsupportedField(_MAX_TOKENS_ALIASES, "send 'max_tokens'", _off_if(-1)),
    UnsupportedField("max_output_tokens", "send 'max_tokens', or 'max_output_tokens' to /v1/responses", _off_if(-1)),
    UnsupportedField("min_new_tokens", "send 'min_tokens'"),
    UnsupportedField("stop_sequences", "send 'stop', or 'stop_sequences' to /v1/messages"),
    UnsupportedField("repeat_penalty", "send 'repetition_penalty'", _off_if(1)),
    UnsupportedField("n_probs", "send 'logprobs' and 'top_logprobs', or in completions 'logprobs' as a number"),
    UnsupportedField("format", "send 'response_format'"),
    UnsupportedField("regex", "send 'structured_outputs' with \"regex\""),
    UnsupportedField("ebnf", "send 'grammar'"),
    UnsupportedField("structural_tag", "send 'tools'"),
    UnsupportedField("grammar_lazy", "send 'tools' with \"strict\": true"),
    UnsupportedField("extra_body options", "its fields belong into the body itself, beside 'model'"),
    # other ways to choose tokens
    UnsupportedField("use_beam_search", _NO_BEAMS),
    UnsupportedField("num_beams", _NO_BEAMS, _off_if(1)),
    UnsupportedField("length_penalty", "it belongs to beam search, which is not there; leave it out", _off_if(1)),
    UnsupportedField("best_of", "leave it out or send 1; for several answers send 'n'", _off_if(1)),
    UnsupportedField("logits_processors custom_logit_processor", "send 'logit_bias' or 'allowed_token_ids'"),
    UnsupportedField("bad_words bad_words_ids", "send 'logit_bias', with -100 for each token that must not come"),
    UnsupportedField("samplers sampler_seq mirostat mirostat_mode top_a", _NO_SAMPLER),
    UnsupportedField("dynatemp_range xtc_probability dry_multiplier", _NO_SAMPLER),
    UnsupportedField("typical_p typ_p tfs_z", _NO_SAMPLER, _off_if(1)),
    UnsupportedField("top_n_sigma", _NO_SAMPLER, _off_if(-1)),
    # another prompt, or another model
    UnsupportedField("chat_template", _OWN_TEMPLATE),
    UnsupportedField("documents", "send their text in a message"),
    UnsupportedField("truncate_prompt_tokens", "prompts are not cut; leave it out, and shorten the prompt", _off_if()),
    UnsupportedField("prompt_embeds", "send 'prompt' as text or token ids"),
    UnsupportedField("lora lora_path adapters adapter_id", _NO_ADAPTER),
    # answers of other kinds
    UnsupportedField("suffix", "leave it out; nothing is filled in between two texts"),
    UnsupportedField("prompt_logprobs", "a prompt's own log-probabilities are not computed; leave it out", _off_if()),
    UnsupportedField("return_tokens_as_token_ids return_token_ids", "tokens are returned as text; leave it out"),
    UnsupportedField("include_stop_str_in_output", "an answer ends before its stop word; leave it out"),
    UnsupportedField("web_search_options", _NO_SEARCH, _off_if()),
)
UNSUPPORTED_FIELDS_BY_ENDPOINT = {
    "chat": _index_fields(
        UnsupportedField("functions", "send 'tools'"),
        UnsupportedField("function_call", "send 'tools' and 'tool_choice'", _off_if("none", "auto")),
        UnsupportedField("system instructions", "send a message of the role system"),
        UnsupportedField("input", "send 'messages', or 'input' to /v1/responses"),
        UnsupportedField("prompt", "send 'messages' alone, or 'prompt' to /v1/completions"),
        UnsupportedField("echo", "leave it out, or send it to /v1/completions"),
        UnsupportedField("add_special_tokens", "the template writes them; leave it out", _off_unless(True)),
        UnsupportedField("skip_special_tokens", _NO_SPECIAL_TOKENS, _off_unless(False)),
        UnsupportedField("modalities", 'answers are text; leave it out or send ["text"]', _off_if([], ["text"])),
        UnsupportedField("audio", "answers are text; leave it out", _off_if()),
    ),
    "completion": _index_fields(
        UnsupportedField("messages", "send 'prompt' alone, or 'messages' to /v1/chat/completions"),
        UnsupportedField("tools", "send them to /v1/chat/completions"),
        UnsupportedField("top_logprobs", "send 'logprobs' as a number"),
        UnsupportedField("add_special_tokens", "leave it out, or send the prompt as token ids", _off_unless(False)),
    ),
}
_KNOWN_NAMES = (SUPPORTED_FIELDS | IGNORED_FIELDS).union(UNSUPPORTED_FIELDS, *UNSUPPORTED_FIELDS_BY_ENDPOINT.values())


def find_unsupported_field(endpoint: str, body: Mapping[str, object]) -> tuple[str, str] | None:
    """Find the first field that would change the answer elsewhere and can't here, and its hint."""
    fields = UNSUPPORTED_FIELDS | UNSUPPORTED_FIELDS_BY_ENDPOINT[endpoint]
    unsupported = (name for name, value in body.items() if name in fields and not fields[name].is_off(value))
    return next(((name, fields[name].hint) for name in unsupported), None)


def suggest_field(name: str) -> str | None:
    """Suggest the supported field that `name` resembles; None for a known name or one that resembles none."""
    if name in _KNOWN_NAMES or not is_field_name(name):
        return None
    return find_similar(name, sorted(SUPPORTED_FIELDS))


def explain_missing_field(name: str, body: Mapping[str, object]) -> str | None:
    """Fault of a body without the field that its endpoint answers, where the body has another in its place."""
    for other, path in ENDPOINT_FIELDS.items():
        if other != name and body.get(other) is not None:
            return f"is missing; this body has '{other}': send it to {path}"
    misspelt = (given for given in islice(body, NAMES_COMPARED_MAX) if suggest_field(given) == name)
    return next((f"is missing; this body has '{given}': write it '{name}'" for given in misspelt), None)


class TypoNotices:
    """Log of field names that look misspelt, each once.  One thread."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def log_typos(self, body: Mapping[str, object]) -> None:
        for name in sorted(body.keys() - _KNOWN_NAMES - self._seen):
            if len(name) > NAME_CHARS_MAX or len(self._seen) >= NAMES_MAX:
                continue
            self._seen.add(name)
            if suggestion := suggest_field(name):
                log.warning("request field '%s' is not known and has no effect; did you mean '%s'?", name, suggestion)
