"""Formats of strings: expressions that llguidance forces, and checks.  Pure.

Expressions follow the grammars of the RFCs that JSON Schema names.  Formats that are not listed have no effect.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache

import idna

from warmline_backend.structured_output.json_schema.expressions.parser import parse_pattern
from warmline_backend.structured_output.json_schema.patterns import (
    ForcedPattern,
    PatternError,
    compile_check,
    force_pattern,
)

HOST_CHARS_MAX = 253

# ---- RFC 3339.  Year 0000 is a leap year.
_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_HOUR, _MINUTE, _SECOND = r"(?:[01]\d|2[0-3])", r"[0-5]\d", r"(?:[0-5]\d)"
_OFFSET = rf"(?:[Zz]|[+\-]{_HOUR}:{_MINUTE})"
_TIME = rf"{_HOUR}:{_MINUTE}:{_SECOND}(?:\.\d+)?{_OFFSET}"  # leap seconds are checked, but not forced
_SECONDS, _DAYS = r"\d+S", r"\d+D"
_MINUTES, _MONTHS = rf"\d+M(?:{_SECONDS})?", rf"\d+M(?:{_DAYS})?"
_HOURS, _YEARS = rf"\d+H(?:{_MINUTES})?", rf"\d+Y(?:{_MONTHS})?"
_DURATION_TIME = rf"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"
_DURATION = rf"P(?:(?:{_DAYS}|{_MONTHS}|{_YEARS})(?:{_DURATION_TIME})?|{_DURATION_TIME}|\d+W)"

# ---- Addresses: RFC 2673, RFC 4291, RFC 1123, RFC 5321
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_HEX16 = r"[0-9A-Fa-f]{1,4}"
_LAST32 = rf"(?:{_HEX16}:{_HEX16}|{_IPV4})"
_IPV6 = (
    rf"(?:(?:{_HEX16}:){{6}}{_LAST32}|::(?:{_HEX16}:){{5}}{_LAST32}|(?:{_HEX16})?::(?:{_HEX16}:){{4}}{_LAST32}"
    rf"|(?:(?:{_HEX16}:){{0,1}}{_HEX16})?::(?:{_HEX16}:){{3}}{_LAST32}"
    rf"|(?:(?:{_HEX16}:){{0,2}}{_HEX16})?::(?:{_HEX16}:){{2}}{_LAST32}"
    rf"|(?:(?:{_HEX16}:){{0,3}}{_HEX16})?::{_HEX16}:{_LAST32}|(?:(?:{_HEX16}:){{0,4}}{_HEX16})?::{_LAST32}"
    rf"|(?:(?:{_HEX16}:){{0,5}}{_HEX16})?::{_HEX16}|(?:(?:{_HEX16}:){{0,6}}{_HEX16})?::)"
)
_LABEL = r"[0-9A-Za-z](?:[0-9A-Za-z\-]{0,61}[0-9A-Za-z])?"
_HOSTNAME = rf"(?=[\s\S]{{1,{HOST_CHARS_MAX}}}$){_LABEL}(?:\.{_LABEL})*"
_MAIL_LABEL = r"[0-9A-Za-z](?:[0-9A-Za-z\-]*[0-9A-Za-z])?"
_MAIL_ATOM = r"[0-9A-Za-z!#$%&'*+\-/=?^_`{|}~]+"
_MAIL_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = (
    rf"(?:{_MAIL_ATOM}(?:\.{_MAIL_ATOM})*|{_MAIL_QUOTED})"
    rf"@(?:{_MAIL_LABEL}(?:\.{_MAIL_LABEL})*|\[(?:{_IPV4}|IPv6:{_IPV6})\])"
)

# ---- RFC 3986, RFC 3987, RFC 6570
_PERCENT = r"%[0-9A-Fa-f]{2}"
_UNRESERVED = r"0-9A-Za-z\-._~"
_SUB_DELIMITERS = r"!$&'()*+,;="
# With the noncharacters of the planes 1 to 12, for a short expression.
_IRI_CHARS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\u{10000}-\u{DFFFD}\u{E1000}-\u{EFFFD}"
_PRIVATE_CHARS = r"\ue000-\uf8ff\u{F0000}-\u{FFFFD}\u{100000}-\u{10FFFD}"


def _write_uri(chars: str, private: str, relative: bool) -> str:
    """Write the expression of a URI, or of a reference; `chars` and `private` are an IRI's further characters."""
    basic = _UNRESERVED + _SUB_DELIMITERS + chars
    path_char = rf"(?:[{basic}:@]|{_PERCENT})"
    host = rf"(?:\[(?:{_IPV6}|[Vv][0-9A-Fa-f]+\.[{_UNRESERVED}{_SUB_DELIMITERS}:]+)\]|(?:[{basic}]|{_PERCENT})*)"
    authority = rf"//(?:(?:[{basic}:]|{_PERCENT})*@)?{host}(?::\d*)?(?:/{path_char}*)*"
    absolute = rf"/(?:{path_char}+(?:/{path_char}*)*)?"
    rest = rf"(?:\?(?:[{basic}{private}:@/?]|{_PERCENT})*)?(?:#(?:[{basic}:@/?]|{_PERCENT})*)?"
    uri = rf"[A-Za-z][0-9A-Za-z+.\-]*:(?:{authority}|{absolute}|{path_char}+(?:/{path_char}*)*)?"
    if not relative:
        return uri + rest
    first = rf"(?:[{basic}@]|{_PERCENT})+"  # without a colon, which would end a scheme
    return rf"(?:{uri}|{authority}|{absolute}|{first}(?:/{path_char}*)*)?{rest}"


_TEMPLATE_NAME_CHAR = rf"(?:[0-9A-Za-z_]|{_PERCENT})"
_TEMPLATE_VARIABLE = rf"{_TEMPLATE_NAME_CHAR}(?:\.?{_TEMPLATE_NAME_CHAR})*(?::[1-9]\d{{0,3}}|\*)?"
_TEMPLATE_LITERAL = rf"[!#$&'-;=?-\[\]_a-z~{_IRI_CHARS}{_PRIVATE_CHARS}]|{_PERCENT}"
_URI_TEMPLATE = rf"(?:{_TEMPLATE_LITERAL}|\{{[+#./;?&=,!@|]?{_TEMPLATE_VARIABLE}(?:,{_TEMPLATE_VARIABLE})*\}})*"

# ---- RFC 6901
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

_EXPRESSIONS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _write_uri("", "", relative=False),
    "uri-reference": _write_uri("", "", relative=True),
    "iri": _write_uri(_IRI_CHARS, _PRIVATE_CHARS, relative=False),
    "iri-reference": _write_uri(_IRI_CHARS, _PRIVATE_CHARS, relative=True),
    "uri-template": _URI_TEMPLATE,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
    # In part: what is needed at least.
    "idn-email": r"[^@]+@[^@]+",
    "idn-hostname": r"[^\s!-,/:-@\[-`{-\u007f]+",
    "regex": r"[\s\S]*",
}
_FORCED_IN_PART = ("idn-email", "idn-hostname", "regex")

FORMATS: Mapping[str, str] = {
    name: "forced in part, and checked" if name in _FORCED_IN_PART else "forced" for name in sorted(_EXPRESSIONS)
}


def force_format(name: str) -> ForcedPattern | None:
    """Patterns of a format for llguidance; None for a format without effect.

    Leap seconds are valid, but never forced.
    """
    return _force_known(name) if name in _EXPRESSIONS else None


def check_format(name: str) -> Callable[[str], bool] | None:
    """Exact test of a format; None for a format without effect.  The test raises CheckTooCostlyError."""
    return _check_known(name) if name in _EXPRESSIONS else None


@cache
def _force_known(name: str) -> ForcedPattern:
    forced = force_pattern(f"^(?:{_EXPRESSIONS[name]})$")
    return ForcedPattern(forced.patterns, forced.is_exact and name not in _FORCED_IN_PART)


@cache
def _check_known(name: str) -> Callable[[str], bool]:
    matches = compile_check(f"^(?:{_EXPRESSIONS[name]})$")
    match name:
        case "time" | "date-time":
            matches_leap_second = compile_check(f"^(?:{_EXPRESSIONS[name].replace(_SECOND, '60')})$")
            return lambda text: matches(text) or (matches_leap_second(text) and _is_last_minute(text))
        case "idn-hostname":
            return lambda text: matches(text) and _is_idn_hostname(text)
        case "idn-email":
            return lambda text: matches(text) and _is_idn_email(text)
        case "regex":
            return _is_pattern
    return matches


def _is_last_minute(text: str) -> bool:
    """True for a valid time that is in the last minute of a day in UTC, where leap seconds are."""
    time, offset = re.split(r"(?=[Zz+\-][0-9:]*$)", re.split("[Tt]", text)[-1], maxsplit=1)
    hours, minutes = (int(part) for part in time.split(":")[:2])
    if offset not in ("Z", "z"):
        sign = 1 if offset[0] == "+" else -1
        hours, minutes = hours - sign * int(offset[1:3]), minutes - sign * int(offset[4:6])
    return (hours * 60 + minutes) % (24 * 60) == 24 * 60 - 1


def _is_idn_hostname(text: str) -> bool:
    if len(text) > HOST_CHARS_MAX:
        return False
    try:
        idna.encode(text)
    except UnicodeError:
        return False
    return True


def _is_idn_email(text: str) -> bool:
    """True for an address whose ASCII part is like an email's, and whose host is an internationalized one."""
    local, _, host = text.rpartition("@")
    replaced = re.sub(r"[^\x00-\x7f]", "x", local)
    check = check_format("email")
    assert check is not None
    return check(f"{replaced}@{host if host.startswith('[') else 'host'}") and (
        host.startswith("[") or _is_idn_hostname(host)
    )


def _is_pattern(text: str) -> bool:
    try:
        parse_pattern(text, strict=True)
    except PatternError:
        return False
    return True
