"""Integers in JSON, which has one kind of number.  Pure."""


def convert_integer(value: object) -> int | None:
    """An integer, also from a float without a fraction, such as 20.0; None for any other value."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
