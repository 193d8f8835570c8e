"""A call for several choices as one for each, and their streams as one (pure).

What says so are fields of the internal form, OpenAI's: `n`, and in completions a list of prompts.  Choice `i` of a
prompt has the seed `seed + i`; indices count on from prompt to prompt, as OpenAI's do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from warmline_common.protocol.messages import decode
from warmline_proxy.api.base import Chunk, Fields
from warmline_proxy.errors import bad_request
from warmline_proxy.http.body_fields import value_of

CHOICES_MAX = 16  # of one prompt
PROMPTS_MAX = 64
_INT64 = 1 << 63

_NO_CHOICES = b"[]"


@dataclass(frozen=True)
class Choice:
    """One generation of a call."""

    fields: Fields  # of a body that asks for this choice alone
    prompt: int  # which of the body's prompts it answers, from 0
    number: int  # among those of its prompt, from 0


def split(endpoint: str, fields: Fields) -> list[Choice]:
    """The choices that a body asks for, in their order.  Raises ClientError 400.

    What else may be wrong with prompts and seeds is found where each is rendered: by the backend.
    """
    count = _count(fields)
    prompts = _prompts(fields) if endpoint == "completion" else []
    if count == 1 and len(prompts) < 2:
        return [Choice(_without(fields, "n", "best_of"), 0, 0)]
    bodies = [_without(fields, "n", "best_of") | changed for changed in prompts or [{}]]
    return [
        Choice(body | _seed(fields, number), prompt, number)
        for prompt, body in enumerate(bodies)
        for number in range(count)
    ]


def _count(fields: Fields) -> int:
    count = 1 if (given := value_of(fields, "n")) is None else given
    if type(count) is not int or not 1 <= count <= CHOICES_MAX:
        raise bad_request(f"'n' must be an integer from 1 to {CHOICES_MAX}.", param="n")
    if value_of(fields, "best_of") not in (None, count, 0):
        message = "'best_of' other than 'n' is not supported: leave it out; every choice that is computed is returned."
        raise bad_request(message, param="best_of")
    return count


def _prompts(fields: Fields) -> list[Fields]:
    """What of a body changes from prompt to prompt; nothing where it has one prompt, be it a list of token ids."""
    raw = fields.get("prompt")
    if not isinstance(raw, msgspec.Raw) or bytes(raw)[1:].lstrip()[:1] not in (b'"', b"["):
        return []
    try:
        prompts = decode(raw, list[msgspec.Raw])
    except msgspec.DecodeError:  # no list, then: a string, or what the backend refuses
        return []
    if len(prompts) > PROMPTS_MAX:
        raise bad_request(f"'prompt' has {len(prompts)} prompts; at most {PROMPTS_MAX} are answered.", param="prompt")
    return [{"prompt": prompt} for prompt in prompts]


def _seed(fields: Fields, number: int) -> Fields:
    seed = value_of(fields, "seed")
    if type(seed) is not int or not number:
        return {}
    return {"seed": (seed + number + _INT64) % (2 * _INT64) - _INT64}


def _without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


class Merger:
    """Makes one answer's chunks of those of its choices; of each, chunks come in order."""

    def __init__(self, request_id: str, choices: Sequence[Choice]) -> None:
        self._request_id, self._choices = request_id, choices
        self._head: dict[str, msgspec.Raw] = {}  # what all chunks have in common
        self._usage: dict[str, Any] = {}
        self._last: Chunk = {}

    def chunk(self, index: int, part_id: str, chunk: Chunk) -> Chunk | None:
        """A chunk of the choice `index` as one of the whole answer's; None where it only tells of usage.

        `part_id`: the request id that the choice was computed under, which its chunks' ids end in.
        """
        self._head = self._head or self._head_of(chunk, part_id)
        if "usage" in chunk and bytes(chunk.get("choices", _NO_CHOICES)) == _NO_CHOICES:
            self._last = chunk
            self._add_usage(self._choices[index], decode(chunk["usage"], dict[str, Any]))
            return None
        choices = decode(chunk["choices"], list[dict[str, msgspec.Raw]])
        numbered = [{**choice, "index": index} for choice in choices]
        return {**chunk, **self._head, "choices": _raw(numbered)}

    def usage(self) -> Chunk:
        """The chunk that tells of all choices' usage, once they are done: a prompt counts once."""
        total = self._usage.get("prompt_tokens", 0) + self._usage.get("completion_tokens", 0)
        usage = {**self._usage, "total_tokens": total}
        return {**self._last, **self._head, "usage": _raw(usage)}

    def _head_of(self, chunk: Chunk, part_id: str) -> dict[str, msgspec.Raw]:
        own = decode(chunk["id"], str)
        name = own.removesuffix(part_id) + self._request_id if own.endswith(part_id) else own
        return {"id": _raw(name), "created": chunk["created"]}

    def _add_usage(self, choice: Choice, usage: dict[str, Any]) -> None:
        if choice.number:
            usage = {name: value for name, value in usage.items() if not name.startswith("prompt_")}
        self._usage = _sum(self._usage, usage)


def _sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Of all numbers, at any depth; else the later value."""
    total = dict(one)
    for name, value in other.items():
        if isinstance(value, dict):
            total[name] = _sum(total.get(name) or {}, value)
        elif isinstance(value, int | float) and isinstance(total.get(name), int | float):
            total[name] += value
        else:
            total[name] = value
    return total


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
