"""JSON values in a form that is exact, and cheap to compare and to mention.  Pure."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

EXPONENT_MAX = 5000  # of numbers that are divided, with their digits; `json` reads integers of 4,300


class _ShortText:
    """Says its kind only: messages of the jsonschema package hold the whole value, and cost as much."""

    def __repr__(self) -> str:
        return type(self).__name__


class ObjectValue(_ShortText, dict[str, Any]):
    """A JSON object."""


class ArrayValue(_ShortText, list[Any]):
    """A JSON array."""


class TextValue(_ShortText, str):
    """A JSON string."""


def convert_value(value: Any) -> Any:
    """Copy a value with short reprs, and floats as the decimal numbers that they are written as."""
    if isinstance(value, dict):
        return ObjectValue({name: convert_value(inner) for name, inner in value.items()})
    if isinstance(value, list):
        return ArrayValue([convert_value(item) for item in value])
    if isinstance(value, str):
        return TextValue(value)
    return Decimal(repr(value)) if isinstance(value, float) else value


def count_parts(value: Any) -> int:
    """Count the values in a value, itself included."""
    count, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        count += 1
        if isinstance(part, dict | list):
            waiting.extend(part.values() if isinstance(part, dict) else part)
    return count


def is_number(value: object) -> bool:
    """True for numbers of converted values."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """True for integers of converted values, 1.0 among them."""
    if isinstance(value, Decimal):
        return value.is_finite() and value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def is_multiple(value: int | Decimal, divisor: int | Decimal) -> bool | None:
    """True for an exact multiple; None where the numbers are too far apart to tell."""
    if isinstance(value, int) and isinstance(divisor, int):
        return value % divisor == 0
    for number in (Decimal(value), Decimal(divisor)):
        if not number.is_finite() or abs(number.adjusted()) + len(number.as_tuple().digits) > EXPONENT_MAX:
            return None
    return (Fraction(value) / Fraction(divisor)).denominator == 1


def make_key(value: Any, spend: Callable[[int], object]) -> object:
    """Key that equal values share, and no others; spends a step for each part.

    Numbers are spelled: hashes of numbers can be made to collide.
    """
    spend(1)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return ("items", *(make_key(item, spend) for item in value))
    if isinstance(value, dict):
        return frozenset((str(name), make_key(inner, spend)) for name, inner in value.items())
    return (_spell_number(value),) if is_number(value) else (value,)


def _spell_number(value: int | Decimal) -> str:
    sign, digits, exponent = Decimal(value).as_tuple()
    if not isinstance(exponent, int):
        return str(value)
    spelled = "".join(map(str, digits))
    significant = spelled.rstrip("0")
    if not significant:
        return "0"
    return f"{'-' * sign}{significant}e{exponent + len(spelled) - len(significant)}"
