"""Stored responses that a request refers to, by `previous_response_id` or with items of type `item_reference`.

Pure, but for the lookups of a `ResponseHistory`.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import msgspec

from warmline_common.protocol.messages import decode, encode
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
_ITEM_ID = re.compile(r"[a-z]+_(.+)_i?[0-9]+")  # of an item in an answer, or, with an i, in its input


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Item of a stored response.  Many are never looked into: it stays a text until then."""

    text: msgspec.Raw
    id: str  # by which it is listed and referred to
    type: str
    own_id: str  # in its text; differs where an item before it has the same

    @property
    def size(self) -> int:
        """Bytes of its text."""
        return memoryview(self.text).nbytes

    def decode(self) -> JsonObject:
        return decode(memoryview(self.text), JsonObject)

    def list(self) -> JsonObject | msgspec.Raw:
        """The item with the id by which it is listed."""
        return self.text if self.id == self.own_id else {**self.decode(), "id": self.id}

    def copy(self) -> "StoredItem":
        """The item alone, without the text of its response."""
        return StoredItem(self.text.copy(), self.id, self.type, self.own_id)


Item = JsonObject | StoredItem


def find_type(item: object) -> object:
    """Type of an item; None where it has none, or is no item."""
    if isinstance(item, StoredItem):
        return item.type
    return item.get("type") if isinstance(item, dict) else None


def decode_item(item: Any) -> Any:
    """The item as an object; other values as they are."""
    return item.decode() if isinstance(item, StoredItem) else item


@dataclass(frozen=True)
class AnsweredRequest:
    """A response and its whole input, the items before it included, to be stored."""

    response: JsonObject
    input: list[Item]

    @property
    def item_ids(self) -> list[str]:
        """Ids of all items, by which they are listed."""
        heads = [
            (item.type, item.own_id) if isinstance(item, StoredItem) else (item["type"], item["id"])
            for item in self.input
        ]
        answer_id = self.response["id"].removeprefix(RESPONSE_PREFIX)
        return [*_list_unique_ids(heads, answer_id), *(item["id"] for item in self.response["output"])]

    def encode(self) -> bytes:
        items = [item.text if isinstance(item, StoredItem) else item for item in self.input]
        return encode({"response": self.response, "input": items})


@dataclass(frozen=True)
class StoredResponse:
    """A response and its whole input, read again; the items' ids are unique in either."""

    response: msgspec.Raw
    input: list[StoredItem]
    output: list[StoredItem]

    @property
    def items(self) -> list[StoredItem]:
        """The conversation, up to the response's end."""
        return [*self.input, *self.output]


class _StoredText(msgspec.Struct, frozen=True):
    response: msgspec.Raw
    input: list[msgspec.Raw]


class _ResponseHead(msgspec.Struct, frozen=True):
    id: str
    output: list[msgspec.Raw]


class _ItemHead(msgspec.Struct, frozen=True):
    id: str
    type: str


def parse_response(text: bytes | bytearray) -> StoredResponse:
    """Response of an `AnsweredRequest`'s JSON, which is kept, and not copied.  Raises msgspec.DecodeError."""
    stored = decode(text, _StoredText)
    head = decode(memoryview(stored.response), _ResponseHead)
    answer_id = head.id.removeprefix(RESPONSE_PREFIX)
    return StoredResponse(stored.response, _parse_items(stored.input, answer_id), _parse_items(head.output, answer_id))


def _parse_items(texts: list[msgspec.Raw], answer_id: str) -> list[StoredItem]:
    heads = [decode(memoryview(text), _ItemHead) for text in texts]
    ids = _list_unique_ids([(head.type, head.id) for head in heads], answer_id)
    return [StoredItem(text, each, head.type, head.id) for text, each, head in zip(texts, ids, heads, strict=True)]


def _list_unique_ids(heads: list[tuple[str, str]], answer_id: str) -> list[str]:
    """Ids of items by their types and own ids: where an earlier one has the same, one by the item's place."""
    own_ids, ids = {own_id for _, own_id in heads}, dict[str, None]()
    for at, (kind, own_id) in enumerate(heads):
        item_id, number = own_id, at
        while item_id in ids or (item_id != own_id and item_id in own_ids):
            item_id, number = _name_item(kind, f"{answer_id}_i{number}"), number + len(heads)
        ids[item_id] = None
    return list(ids)


class ResponseHistory(Protocol):
    """Stored responses of one client, as one request reads them: what it keeps of them counts as its body's.

    Methods raise ClientError 503 where there is no memory for that, 413 where there never is.
    """

    @property
    def is_off(self) -> bool:
        """True where no responses are stored."""

    @property
    def response_bytes_max(self) -> int:
        """Size of the largest response that is stored."""

    async def find_response(self, answer_id: str) -> StoredResponse | None: ...

    async def find_items(self, item_id: str, wanted_ids: Collection[str]) -> Mapping[str, StoredItem]:
        """The item, where it is stored, and the wanted ones that are found beside it; by id."""

    def find_running(self, answer_id: str) -> bool | None:
        """True for a response on its way that will be stored, False for one that will not; None where none is."""

    def count(self, item: StoredItem) -> None:
        """Count one use of an item.  Raises ClientError 400, too, where the body would exceed a bound with it."""


class EmptyHistory:
    """ResponseHistory of a client without stored responses."""

    is_off, response_bytes_max = True, 0

    async def find_response(self, answer_id: str) -> StoredResponse | None:
        return None

    async def find_items(self, item_id: str, wanted_ids: Collection[str]) -> Mapping[str, StoredItem]:
        return {}

    def find_running(self, answer_id: str) -> bool | None:
        return None

    def count(self, item: StoredItem) -> None:
        pass


NO_HISTORY = EmptyHistory()


def find_answer_id(item_id: str) -> str:
    """Id of the answer that an item's id names; "" for other servers' ids."""
    found = _ITEM_ID.fullmatch(item_id)
    return found[1] if found else ""


# ---- reading a request


@dataclass(frozen=True)
class ResolvedInput:
    """Input of a request, its references replaced by the items."""

    earlier: list[StoredItem]  # of the previous response
    given: Any  # `input`, unchecked, with items that are stored

    @property
    def items(self) -> list[Any]:
        """All items; a string is a user's message."""
        text = [{"role": "user", "content": self.given}] if isinstance(self.given, str) else []
        return [*self.earlier, *(self.given if isinstance(self.given, list) else text)]

    @property
    def stored_bytes(self) -> int:
        return sum(item.size for item in self.items if isinstance(item, StoredItem))


async def resolve_input(previous_id: object, given: object, history: ResponseHistory) -> ResolvedInput:
    """Raises ClientError for a reference to what is not stored: 400 for a response, 404 for an item, as OpenAI; 409 for
    what is still being answered; and as ResponseHistory.
    """
    earlier = [] if previous_id is None else (await _find_previous(previous_id, history)).items
    if not isinstance(given, list):
        return ResolvedInput(earlier, given)
    wanted_ids = {item["id"] for item in given if _is_reference(item) and isinstance(item.get("id"), str)}
    resolver = _ReferenceResolver(history, {item.id: item for item in earlier}, wanted_ids)
    return ResolvedInput(earlier, [await resolver.resolve(item, f"input[{at}]") for at, item in enumerate(given)])


def _is_reference(item: object) -> bool:
    """True for a reference; its type is optional and nullable in OpenAI's schema, then it has nothing but an id."""
    if not isinstance(item, dict):
        return False
    given = {name for name, value in item.items() if value is not None}
    return item.get("type") == ITEM_REFERENCE or given == {"id"}


async def _find_previous(previous_id: object, history: ResponseHistory) -> StoredResponse:
    param = "previous_response_id"
    if not isinstance(previous_id, str):
        raise bad_request(f"'{param}' must be a string.", param=param)
    answer_id = previous_id.removeprefix(RESPONSE_PREFIX)
    if previous := await history.find_response(answer_id):
        return previous
    if (is_stored := history.find_running(answer_id)) is not None:
        raise still_running(previous_id, is_stored, param)
    message = f"Previous response with id '{_shorten(previous_id)}' not found: {_explain(history)}.  {SEND_WHOLE}."
    raise bad_request(message, code="previous_response_not_found", param=param)


class _ReferenceResolver:
    """Finds items by their ids.  The newest response of a conversation has all of its items: mostly one is read."""

    def __init__(
        self, history: ResponseHistory, known_items: dict[str, StoredItem], wanted_ids: Collection[str]
    ) -> None:
        self._history, self._items, self._wanted_ids = history, known_items, wanted_ids
        self._bytes = 0  # of the items that were referred to, each as often as it was

    async def resolve(self, item: object, where: str) -> object:
        """The item that a reference names; other values as they are.  Raises ClientError."""
        if not isinstance(item, dict) or not _is_reference(item):
            return item
        if not isinstance(item_id := item.get("id"), str):
            raise bad_request(f"'{where}.id' must be a string.", param=f"{where}.id")
        if item_id not in self._items:
            self._items |= await self._history.find_items(item_id, self._wanted_ids)
        if (found := self._items.get(item_id)) is None:
            raise _item_not_found(item_id, where, self._history)
        self._count(found, where)
        return found

    def _count(self, item: StoredItem, where: str) -> None:
        """Raise ClientError where references repeat so much that the prompt would take the memory."""
        self._history.count(item)
        self._bytes += item.size
        if self._bytes > BODY_BYTES_MAX:
            message = f"The items that 'input' refers to have more than {BODY_BYTES_MAX >> 20} MiB, up to '{where}'."
            raise bad_request(message, status=413, param=where)


def _item_not_found(item_id: str, where: str, history: ResponseHistory) -> ClientError:
    if (is_stored := history.find_running(answer_id := find_answer_id(item_id))) is not None:
        return still_running(RESPONSE_PREFIX + answer_id, is_stored, "input")
    reason = _explain(history)
    message = f"Item with id '{_shorten(item_id)}' ('{where}') not found: {reason}.  {SEND_WHOLE}, or remove it."
    return bad_request(message, status=404, code="item_not_found", param="input")


def still_running(response_id: str, is_stored: bool, param: str | None = None) -> ClientError:
    """Error about the items of a response that is not stored yet, or will not be."""
    advice = "wait for its end, and send this again" if is_stored else f"it will not be stored.  {SEND_WHOLE}"
    message = f"Response with id '{_shorten(response_id)}' is still being answered: {advice}."
    return bad_request(message, status=409, code="response_in_progress", param=param)


def _explain(history: ResponseHistory) -> str:
    if history.is_off:
        return "this server stores no responses, as with 'store: false'"
    return "it was answered with 'store: false', or was deleted, or is no longer stored"


def _shorten(item_id: str) -> str:
    return item_id[:80] if item_id.isprintable() else "?"


# ---- storing a response


def normalize_input(items: Iterable[Item], answer_id: str) -> list[Item]:
    """Items as OpenAI's API lists them: each with a type and an id, messages with a list of parts."""
    return [
        item if isinstance(item, StoredItem) else _normalize_item(item, f"{answer_id}_i{at}")
        for at, item in enumerate(items)
    ]


def _name_item(kind: str, name: str) -> str:
    return f"{_ID_PREFIXES.get(kind, 'item')}_{name}"


def _normalize_item(item: JsonObject, name: str) -> JsonObject:
    kind, item_id = item.get("type") or "message", item.get("id")
    if not (isinstance(item_id, str) and item_id):
        item_id = _name_item(kind, name)
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


def build_item_page(items: list[StoredItem], limit: int, ascending: bool, after: str) -> JsonObject:
    """A page of a list, in OpenAI's form.  Raises ClientError 400 where `after`, unless "", is no item's id."""
    ordered = items if ascending else items[::-1]
    ids = [item.id for item in ordered]
    if after and after not in ids:
        raise bad_request(f"'after' is '{_shorten(after)}', which is no item of this response's input.", param="after")
    begin = ids.index(after) + 1 if after else 0
    page = list(islice(ordered, begin, begin + limit))
    return {
        "object": "list",
        "data": [item.list() for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": begin + limit < len(ordered),
    }
