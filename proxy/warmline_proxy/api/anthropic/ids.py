"""Names that Anthropic's clients and OpenAI's have different forms of.  Pure."""

import re

import msgspec

_OWN_CALL_ID = re.compile(r"(?:call|toolu)_([0-9a-f]{24})")
_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")


def tool_use_id(call_id: str) -> str:
    """As Anthropic writes it: toolu_<24 hex digits>; ids that aren't ours stay as they are."""
    return f"toolu_{ours[1]}" if (ours := _OWN_CALL_ID.fullmatch(call_id)) else call_id


def call_id(tool_use_id: str) -> str:
    """The way back: call_<24 hex digits>, under which the sampled tokens of a call are remembered."""
    return f"call_{ours[1]}" if (ours := _OWN_CALL_ID.fullmatch(tool_use_id)) else tool_use_id


def parse_session(user_id: str) -> str:
    """What `metadata.user_id` says of the conversation: Claude Code puts it there, as JSON or as an ending."""
    if match := _SESSION.search(user_id):
        return match[1]
    try:
        value = msgspec.json.decode(user_id)
    except (msgspec.DecodeError, RecursionError):
        return user_id
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) and session else user_id
