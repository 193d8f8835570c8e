"""Split of a call for several choices into one call each, and merge of their streams (pure).

Choices come from the fields `n` and, in completions, a list of prompts.  Choice `i` of a prompt has the seed
`seed + i`; indices count on from prompt to prompt, as OpenAI's do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from warmline_common.protocol.json_structure import convert_integer
from warmline_common.protocol.messages import decode
from warmline_proxy.api.base import Chunk, Fields, is_usage_chunk
from warmline_proxy.errors import bad_request
from warmline_proxy.http.body_fields import decode_field

CHOICES_MAX = 16  # of one prompt
PROMPTS_MAX = 64
RANDOM_SEED = -1  # for the backend: an unpredictable one
_INT64 = 1 << 63


@dataclass(frozen=True)
class ChoiceRequest:
    """One generation of a call."""

    fields: Fields  # of a call for this choice alone
    prompt_index: int  # among the body's prompts, from 0
    sample_index: int  # among those of its prompt, from 0


def split_choices(endpoint: str, fields: Fields) -> list[ChoiceRequest]:
    """Choices of a body, in order.  Raises ClientError 400; invalid prompts and seeds are refused by the backend."""
    count = _read_count(fields)
    prompts = _split_prompts(fields) if endpoint == "completion" else []
    if count == 1 and len(prompts) < 2:
        return [ChoiceRequest(_omit_fields(fields, "n", "best_of"), 0, 0)]
    prompt_fields = [_omit_fields(fields, "n", "best_of") | changed for changed in prompts or [{}]]
    return [
        ChoiceRequest(body | _offset_seed(fields, number), prompt, number)
        for prompt, body in enumerate(prompt_fields)
        for number in range(count)
    ]


def _read_count(fields: Fields) -> int:
    count = 1 if (given := decode_field(fields, "n")) is None else convert_integer(given)
    if count is None or not 1 <= count <= CHOICES_MAX:
        raise bad_request(f"'n' must be an integer from 1 to {CHOICES_MAX}.", param="n")
    if decode_field(fields, "best_of") not in (None, count, 0):
        message = "'best_of' other than 'n' is not supported: leave it out; every choice that is computed is returned."
        raise bad_request(message, param="best_of")
    return count


def _split_prompts(fields: Fields) -> list[Fields]:
    """Fields that differ from prompt to prompt; [] for a single prompt, which may be a list of token ids."""
    raw = fields.get("prompt")
    if not isinstance(raw, msgspec.Raw) or bytes(raw)[1:].lstrip()[:1] not in (b'"', b"["):
        return []
    try:
        prompts = decode(raw, list[msgspec.Raw])
    except msgspec.DecodeError:  # one string, or refused by the backend
        return []
    if len(prompts) > PROMPTS_MAX:
        raise bad_request(f"'prompt' has {len(prompts)} prompts; at most {PROMPTS_MAX} are answered.", param="prompt")
    return [{"prompt": prompt} for prompt in prompts]


def _offset_seed(fields: Fields, sample_index: int) -> Fields:
    seed = convert_integer(decode_field(fields, "seed"))
    if seed in (None, RANDOM_SEED) or not sample_index:
        return {}
    return {"seed": (seed + sample_index + _INT64) % (2 * _INT64) - _INT64}


def _omit_fields(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


class ChoiceMerger:
    """Merges the chunks of several choices into one response's; each choice's chunks come in order."""

    def __init__(self, request_id: str, choices: Sequence[ChoiceRequest]) -> None:
        self._request_id, self._choices = request_id, choices
        self._common_fields: dict[str, msgspec.Raw] = {}  # `id` and `created`
        self._usage: dict[str, Any] = {}
        self._last_usage_chunk: Chunk = {}

    def merge_chunk(self, index: int, branch_id: str, chunk: Chunk) -> Chunk | None:
        """A choice's chunk as one of the response's, None if it has usage alone; its id ends with the `branch_id`."""
        if not self._common_fields:
            own = decode(chunk["id"], str)
            name = own.removesuffix(branch_id) + self._request_id if own.endswith(branch_id) else own
            self._common_fields = {"id": _encode_raw(name), "created": chunk["created"]}
        if is_usage_chunk(chunk):
            self._last_usage_chunk, usage = chunk, decode(chunk["usage"], dict[str, Any])
            if self._choices[index].sample_index:  # a prompt counts once
                usage = {name: value for name, value in usage.items() if not name.startswith("prompt_")}
            self._usage = _sum_usage(self._usage, usage)
            return None
        choices = decode(chunk["choices"], list[dict[str, msgspec.Raw]])
        indexed = [{**choice, "index": index} for choice in choices]
        return {**chunk, **self._common_fields, "choices": _encode_raw(indexed)}

    def build_usage_chunk(self) -> Chunk:
        """Usage of all choices, once they are done."""
        total = self._usage.get("prompt_tokens", 0) + self._usage.get("completion_tokens", 0)
        usage = {**self._usage, "total_tokens": total}
        return {**self._last_usage_chunk, **self._common_fields, "usage": _encode_raw(usage)}


def _sum_usage(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Sum of all numbers, at any depth; of other values the later one."""
    total = dict(one)
    for name, value in other.items():
        if isinstance(value, dict):
            total[name] = _sum_usage(total.get(name) or {}, value)
        elif isinstance(value, int | float) and isinstance(total.get(name), int | float):
            total[name] += value
        else:
            total[name] = value
    return total


def _encode_raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
