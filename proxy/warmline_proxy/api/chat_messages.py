"""Messages of the internal form, read in part: what is not looked into stays raw.  Pure."""

from typing import Any

import msgspec

from warmline_common.protocol.messages import convert, decode


def decode_elements(value: Any) -> list[Any]:
    """Decode a list; the elements of a raw one stay raw, since only those of the head are needed."""
    return decode_as(value, list[msgspec.Raw] if isinstance(value, msgspec.Raw) else list) or []


def decode_as(value: Any, kind: Any) -> Any:
    """Decode a value of that type; None where it has another type, or is no JSON."""
    try:
        return decode(value, kind) if isinstance(value, msgspec.Raw) else convert(value, kind)
    except (msgspec.MsgspecError, RecursionError):
        return None


def extract_texts(content: Any) -> list[str]:
    """Texts of a message's content, a string or parts, each an object or a string."""
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]
