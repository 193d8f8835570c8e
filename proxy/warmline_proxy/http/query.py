"""Checked query parameters."""

from collections.abc import Collection

from aiohttp import web

from warmline_proxy.errors import bad_request

NUMBER_DIGITS_MAX = 9


def parse_number(request: web.Request, name: str, default: int, maximum: int) -> int:
    """Integer from 0 to `maximum`.  Raises ClientError 400."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX and int(text) <= maximum):
        raise bad_request(f"{name} must be a whole number from 0 to {maximum}, not {text[:40]!r}.", param=name)
    return int(text)


def parse_choice(request: web.Request, name: str, default: str, choices: Collection[str]) -> str:
    """One of the choices.  Raises ClientError 400."""
    text = request.query.get(name, default)
    if text not in choices:
        raise bad_request(f"{name} must be one of {', '.join(choices)}, not {text[:40]!r}.", param=name)
    return text
