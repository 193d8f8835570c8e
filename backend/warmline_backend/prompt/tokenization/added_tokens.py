"""Added tokens that separate a text: what lies before and behind one is tokenized apart.

The tokenizers library looks for added tokens first, from left to right, the longest one at each place, in the text as
it is (those with `normalized` follow, within the pieces).  Only then are the pieces between them normalized, split
into words and tokenized, each by itself.  So a text that begins where a separator was found has the tokens that it has
within the whole.  `lstrip`, `rstrip` and `single_word` let a token depend on the text beside it.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding, Tokenizer

log = logging.getLogger(__name__)

# They change no ids where special tokens are not asked for.
_POST_PROCESSORS = frozenset({"ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"})
_SPACES = " \t\r\n\f\v\u2581\u0120"  # of texts and of vocabularies; offsets may leave them out


@dataclass(frozen=True)
class Separators:
    """Added tokens that separate a text; none where a tokenizer has no such tokens for certain."""

    texts: Mapping[int, str]  # by id
    chars_max: int  # of any added token that is found in the text as it is

    def __bool__(self) -> bool:
        return bool(self.texts)


NO_SEPARATORS = Separators({}, 0)


def find_separators(tokenizer: Tokenizer) -> Separators:
    """Find the separators of a tokenizer by its settings, and try one of them."""
    added = {token: entry for token, entry in tokenizer.get_added_tokens_decoder().items() if not entry.normalized}
    if any(entry.lstrip or entry.rstrip or entry.single_word for entry in added.values()):
        return NO_SEPARATORS
    texts = {token: entry.content for token, entry in added.items() if entry.content.strip(_SPACES) == entry.content}
    if not texts or not _tokenizes_pieces_apart(tokenizer):
        return NO_SEPARATORS
    if not _is_separated(tokenizer, next(iter(texts.values()))):
        log.warning("the tokenizer does not split texts at its added tokens: each prompt is tokenized whole")
        return NO_SEPARATORS
    return Separators(texts, max(len(entry.content) for entry in added.values()))


def _tokenizes_pieces_apart(tokenizer: Tokenizer) -> bool:
    """True where a piece between added tokens has the same tokens in every text."""
    if tokenizer.encode_special_tokens or tokenizer.truncation or tokenizer.padding:
        return False
    if getattr(tokenizer.model, "dropout", None):  # random
        return False
    try:
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
            _read_settings(part)
        return _list_types(_read_settings(tokenizer.post_processor)) <= _POST_PROCESSORS
    except Exception:  # noqa: BLE001  what the library raises for a part written in Python
        return False


def _read_settings(part: Any) -> dict[str, Any]:
    """Settings of a part, as in the tokenizer's JSON.  Raises Exception for one that is written in Python."""
    settings: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return settings


def _list_types(settings: dict[str, Any]) -> set[str]:
    if settings.get("type") == "Sequence":
        return set().union(*map(_list_types, settings["processors"]))
    return {settings["type"]} if settings else set()


def _is_separated(tokenizer: Tokenizer, separator: str) -> bool:
    head, tail = f"a b {separator} c  d", f"{separator}{separator}the end. {separator}f\n"
    whole, first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (head + tail, head, tail))
    return whole.ids == first.ids + second.ids and _list_ends(whole) == [
        *_list_ends(first),
        *(len(head) + end for end in _list_ends(second)),
    ]


def _list_ends(encoding: Encoding) -> list[int]:
    return [end for _, end in encoding.offsets]
