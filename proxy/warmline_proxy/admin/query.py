"""What a query asks for, checked."""

from collections.abc import Collection

from aiohttp import web

from warmline_proxy.errors import bad_request

NUMBER_DIGITS_MAX = 9


def number(request: web.Request, name: str, default: int, most: int) -> int:
    """Raises ClientError 400."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX and int(text) <= most):
        raise bad_request(f"{name} must be a whole number from 0 to {most}, not {text[:40]!r}.", param=name)
    return int(text)


def one_of(request: web.Request, name: str, default: str, known: Collection[str]) -> str:
    """Raises ClientError 400."""
    text = request.query.get(name, default)
    if text not in known:
        raise bad_request(f"{name} must be one of {', '.join(known)}, not {text[:40]!r}.", param=name)
    return text
