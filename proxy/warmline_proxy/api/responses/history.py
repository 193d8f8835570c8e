"""Stored responses that a request refers to, by `previous_response_id` or with items of type `item_reference`.

Pure, but for the lookups of a `ResponseHistory`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import msgspec

from warmline_proxy.api.custom_tools import JsonObject
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.bodies import BODY_BYTES_MAX

RESPONSE_PREFIX = "resp_"
ITEM_REFERENCE = "item_reference"
SEND_WHOLE = "Send the items of the whole conversation as 'input' (their stored KV is reused)"
PAGE_ITEMS_DEFAULT, PAGE_ITEMS_MAX = 20, 100

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and its whole input, the items before it included."""

    response: JsonObject
    input: list[JsonObject]

    @property
    def items(self) -> list[JsonObject]:
        """The conversation, up to the response's end."""
        return [*self.input, *self.response["output"]]

    @property
    def item_ids(self) -> Iterable[str]:
        """Ids of the items; possibly repeated."""
        return (item["id"] for item in self.items)


class ResponseHistory(Protocol):
    """Stored responses of one client."""

    @property
    def is_off(self) -> bool:
        """True where no responses are stored."""

    def find_response(self, answer_id: str) -> StoredResponse | None: ...

    def find_holder(self, item_id: str) -> StoredResponse | None:
        """The newest response that has an item."""


class EmptyHistory:
    """ResponseHistory of a client without stored responses."""

    is_off = True

    def find_response(self, answer_id: str) -> StoredResponse | None:
        return None

    find_holder = find_response


NO_HISTORY = EmptyHistory()


# ---- reading a request


@dataclass(frozen=True)
class ResolvedInput:
    """Input of a request, its references replaced by the items."""

    earlier: list[JsonObject]  # of the previous response
    given: Any  # `input`, unchecked

    @property
    def items(self) -> list[Any]:
        """All items; a string is a user's message."""
        text = [{"role": "user", "content": self.given}] if isinstance(self.given, str) else []
        return [*self.earlier, *(self.given if isinstance(self.given, list) else text)]


def resolve_input(previous_id: object, given: object, history: ResponseHistory) -> ResolvedInput:
    """Raises ClientError for a reference to what is not stored: 400 for a response, 404 for an item, as OpenAI."""
    previous = None if previous_id is None else _find_previous(previous_id, history)
    earlier = previous.items if previous else []
    resolver = _ReferenceResolver(history, earlier)
    items = (
        [resolver.resolve(item, f"input[{at}]") for at, item in enumerate(given)] if isinstance(given, list) else given
    )
    return ResolvedInput(earlier, items)


def _find_previous(previous_id: object, history: ResponseHistory) -> StoredResponse:
    param = "previous_response_id"
    if not isinstance(previous_id, str):
        raise bad_request(f"'{param}' must be a string.", param=param)
    if previous := history.find_response(previous_id.removeprefix(RESPONSE_PREFIX)):
        return previous
    message = f"Previous response with id '{_shorten(previous_id)}' not found: {_explain(history)}.  {SEND_WHOLE}."
    raise bad_request(message, code="previous_response_not_found", param=param)


class _ReferenceResolver:
    """Finds items by their ids.  The newest response of a conversation has all of its items: mostly one is read."""

    def __init__(self, history: ResponseHistory, known_items: Iterable[JsonObject]) -> None:
        self._history = history
        self._items: dict[str, JsonObject] = {}
        self._sizes: dict[str, int] = {}  # of the items that were referred to, as JSON
        self._bytes = 0
        self._add(known_items)

    def resolve(self, item: object, where: str) -> object:
        """The item that a reference names; other values as they are.  Raises ClientError."""
        if not isinstance(item, dict) or item.get("type") != ITEM_REFERENCE:
            return item
        if not isinstance(item_id := item.get("id"), str):
            raise bad_request(f"'{where}.id' must be a string.", param=f"{where}.id")
        if (found := self._find(item_id)) is None:
            raise _item_not_found(item_id, where, self._history)
        self._count(item_id, found, where)
        return found

    def _find(self, item_id: str) -> JsonObject | None:
        if item_id not in self._items and (stored := self._history.find_holder(item_id)):
            self._add(stored.items)
        return self._items.get(item_id)

    def _add(self, items: Iterable[JsonObject]) -> None:
        self._items |= {item["id"]: item for item in items}

    def _count(self, item_id: str, item: JsonObject, where: str) -> None:
        """Raise ClientError 413 where references repeat so much that the prompt would take the memory."""
        if item_id not in self._sizes:
            self._sizes[item_id] = len(msgspec.json.encode(item))
        self._bytes += self._sizes[item_id]
        if self._bytes > BODY_BYTES_MAX:
            message = f"The items that 'input' refers to have more than {BODY_BYTES_MAX >> 20} MiB, up to '{where}'."
            raise bad_request(message, status=413, param=where)


def _item_not_found(item_id: str, where: str, history: ResponseHistory) -> ClientError:
    reason = _explain(history)
    message = f"Item with id '{_shorten(item_id)}' ('{where}') not found: {reason}.  {SEND_WHOLE}, or remove it."
    return bad_request(message, status=404, code="item_not_found", param="input")


def _explain(history: ResponseHistory) -> str:
    if history.is_off:
        return "this server stores no responses, as with 'store: false'"
    return "it was answered with 'store: false', or was deleted, or is no longer stored"


def _shorten(item_id: str) -> str:
    return item_id[:80] if item_id.isprintable() else "?"


# ---- storing a response


def normalize_input(items: Iterable[JsonObject], answer_id: str) -> list[JsonObject]:
    """Items as OpenAI's API lists them: each with a type and an id, messages with a list of parts."""
    return [_normalize_item(item, f"{answer_id}_i{at}") for at, item in enumerate(items)]


def _normalize_item(item: JsonObject, name: str) -> JsonObject:
    kind, item_id = item.get("type") or "message", item.get("id")
    if not (isinstance(item_id, str) and item_id):
        item_id = f"{_ID_PREFIXES.get(kind, 'item')}_{name}"
    normalized = {**item, "id": item_id, "type": kind}
    if kind == "message":
        normalized |= {"status": item.get("status") or "completed", "content": _list_parts(item)}
    return normalized


def _list_parts(message: JsonObject) -> Any:
    content = message.get("content")
    if not isinstance(content, str):
        return [] if content is None else content
    if message.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


# ---- lists of input items


def build_item_page(items: list[JsonObject], limit: int, ascending: bool, after: str) -> JsonObject:
    """A page of a list, in OpenAI's form.  Raises ClientError 400 where `after`, unless "", is no item's id."""
    ordered = items if ascending else items[::-1]
    ids = [item["id"] for item in ordered]
    if after and after not in ids:
        raise bad_request(f"'after' is '{_shorten(after)}', which is no item of this response's input.", param="after")
    begin = ids.index(after) + 1 if after else 0
    page = list(islice(ordered, begin, begin + limit))
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(ordered),
    }
