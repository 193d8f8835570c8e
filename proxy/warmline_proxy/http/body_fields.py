"""Parsing of clients' bodies and headers for every API: null means absent; session names are hints."""

import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import msgspec

from warmline_common.protocol.messages import decode
from warmline_common.protocol.surrogates import replace_escaped_halves
from warmline_proxy.errors import ClientError, bad_request

T = TypeVar("T")

SESSION_HEADERS = ("X-Session-ID", "X-Claude-Code-Session-Id", "X-Litellm-Session-Id", "Session-Id")
SESSION_FIELDS = ("session_id", "prompt_cache_key")
RETRY_COUNT_HEADER = "X-Stainless-Retry-Count"
SESSION_CHARS_MAX = 128
MODEL_CHARS_MAX = 1024  # repeated in every chunk of an answer and in each record

MESSAGES_MAX = 10_000
PROMPT_FIELDS = frozenset(("messages", "prompt", "system", "tools", "functions", "input", "instructions"))
FIELD_BYTES_MAX = 2 * 1024 * 1024  # of any other, such as `user`; long enough for all token ids of a vocabulary

_NULL = b"null"
_TRUNCATED = "Input data was truncated"  # msgspec's whole message
_RETRY_COUNT_PATTERN = re.compile(r"[0-9]{1,6}")


def parse_object(body: bytes) -> dict[str, msgspec.Raw]:
    """Fields of a JSON object, without nulls.  Raises ClientError 400."""
    if not body.strip():
        raise bad_request("The body is empty; it must be a JSON object.")
    try:
        body.decode()  # Raw values are not checked for UTF-8
    except UnicodeDecodeError as error:
        place = f"byte {error.start} (0x{body[error.start]:02x})"
        message = f"We could not parse the JSON body of your request: it is not UTF-8, by {place}.  Send it as UTF-8."
        raise bad_request(message) from None
    try:
        fields = decode_body(body, dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise bad_request("The body must be a JSON object.") from None
    for name, value in fields.items():
        if name not in PROMPT_FIELDS and (size := memoryview(value).nbytes) > FIELD_BYTES_MAX:
            shown = name[:SESSION_CHARS_MAX]
            raise bad_request(f"'{shown}' has {size} bytes; {FIELD_BYTES_MAX} are the most.", param=shown)
    return {name: value for name, value in fields.items() if bytes(value) != _NULL}


def decode_body(body: bytes, kind: type[T]) -> T:
    """Body as that type; halves of surrogate pairs in it become U+FFFD.

    Raises msgspec.ValidationError for JSON of another type, ClientError 400 for what is no JSON.
    """
    try:
        return _decode_whole(body, kind)
    except ClientError:
        if (repaired := replace_escaped_halves(body)) == body:  # searched here alone: most bodies have none
            raise
    return _decode_whole(repaired, kind)


def _decode_whole(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body.removeprefix(BOM_UTF8), kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError) as error:
        is_cut = str(error) == _TRUNCATED
        reason = f"it ends within a value, after {len(body)} bytes; send it whole" if is_cut else str(error)
        raise bad_request(f"We could not parse the JSON body of your request: {reason}") from None


def check_message_count(value: object, name: str) -> None:
    """Raise ClientError 400 for too long a list, decoded or raw; other values are refused where they are read."""
    if isinstance(value, msgspec.Raw):
        if bytes(value).count(b"{") <= MESSAGES_MAX:  # so in nearly all bodies
            return
        with suppress(msgspec.DecodeError):
            value = decode(value, list[msgspec.Raw])
    if isinstance(value, list) and len(value) > MESSAGES_MAX:
        raise bad_request(f"'{name}' has {len(value)} elements; {MESSAGES_MAX} are the most.", param=name)


def decode_field(fields: Mapping[str, Any], name: str) -> Any:
    """Value of a field, raw or decoded; None if absent.  Raises ClientError 400."""
    value = fields.get(name)
    try:
        return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
    except msgspec.DecodeError as error:
        raise bad_request(f"We could not parse {name!r}: {error}", param=name) from None


def decode_optional_field(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Value of a field if it has that type, else None."""
    value = decode_field(fields, name)
    return value if isinstance(value, kind) else None


def parse_model_name(value: object) -> str | None:
    """Model name given by the client, or None.  Raises ClientError 400."""
    if value is None or (isinstance(value, str) and len(value) <= MODEL_CHARS_MAX):
        return value
    raise bad_request(f"'model' must be a string of at most {MODEL_CHARS_MAX} characters.", param="model")


def parse_retry_count(headers: Mapping[str, str]) -> int:
    """Count of earlier tries that the client declares."""
    return int(count) if _RETRY_COUNT_PATTERN.fullmatch(count := headers.get(RETRY_COUNT_HEADER, "")) else 0


def find_session_hint(fields: Mapping[str, msgspec.Raw], headers: Mapping[str, str]) -> str:
    from_headers = (headers.get(name) for name in SESSION_HEADERS)
    from_fields = (decode_optional_field(fields, name, str) for name in SESSION_FIELDS)
    return next((strip_unprintable(value) for value in chain(from_headers, from_fields) if value), "")


def strip_unprintable(text: str) -> str:
    """Shortened text, fit for a log line and for JSON."""
    return "".join(letter for letter in text[:SESSION_CHARS_MAX] if letter.isprintable())
