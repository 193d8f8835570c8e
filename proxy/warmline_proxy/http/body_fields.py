"""Parsing of clients' bodies and headers for every API: null means absent; session names are hints."""

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec

from warmline_common.protocol.messages import decode
from warmline_proxy.errors import bad_request

SESSION_HEADERS = ("X-Session-ID", "X-Claude-Code-Session-Id", "X-Litellm-Session-Id", "Session-Id")
SESSION_FIELDS = ("session_id", "prompt_cache_key")
RETRY_COUNT_HEADER = "X-Stainless-Retry-Count"
SESSION_CHARS_MAX = 128
MODEL_CHARS_MAX = 1024  # repeated in every chunk of an answer and in each record

MESSAGES_MAX = 10_000
PROMPT_FIELDS = frozenset(("messages", "prompt", "system", "tools", "functions", "input", "instructions"))
FIELD_BYTES_MAX = 2 * 1024 * 1024  # of any other, such as `user`; long enough for all token ids of a vocabulary

_NULL = b"null"
_RETRY_COUNT_PATTERN = re.compile(r"[0-9]{1,6}")


def parse_object(body: bytes) -> dict[str, msgspec.Raw]:
    """Fields of a JSON object, without nulls.  Raises ClientError 400."""
    if not body.strip():
        raise bad_request("The body is empty; it must be a JSON object.")
    try:
        body.decode()  # Raw values are not checked for UTF-8
        fields = decode(body, dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise bad_request("The body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}") from None
    for name, value in fields.items():
        if name not in PROMPT_FIELDS and (size := memoryview(value).nbytes) > FIELD_BYTES_MAX:
            shown = name[:SESSION_CHARS_MAX]
            raise bad_request(f"'{shown}' has {size} bytes; {FIELD_BYTES_MAX} are the most.", param=shown)
    return {name: value for name, value in fields.items() if bytes(value) != _NULL}


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
    except msgspec.DecodeError as error:  # e.g. a lone surrogate, which Raw fields do not check
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
