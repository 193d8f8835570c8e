"""Formats of quantized KV, as benchmarks name them: `8`, `8,4`, `8,4/64,32` (groups), `8,4+2x8,8` (boundary layers)."""

import re
from collections.abc import Iterable

from warmline_common.settings.quantization import (
    KvFormat,
    KvQuantization,
    RowFormat,
    make_quantization,
    parse_bits,
    parse_group_size,
)

SCALE_BITS = 32  # a group's scale and bias in 16-bit types
_LABEL = re.compile(r"(?P<bits>[\d,]+)(/(?P<groups>[\d,]+))?(\+(?P<layers>\d+)x(?P<ends>[\d,]+))?")


def parse_format(label: str) -> KvQuantization | None:
    """Quantization of a label; None for `0`.  Raises ValueError."""
    if (found := _LABEL.fullmatch(label)) is None:
        raise ValueError(f"expected a format such as 8, 8,4, 8,4/64,32 or 8,4+2x8,8, not {label!r}")
    return make_quantization(
        parse_bits(found["bits"]),
        parse_group_size(found["groups"] or "64"),
        int(found["layers"] or 0),
        parse_bits(found["ends"] or "0"),
    )


def count_number_bits(quantization: KvQuantization | None, layers: int) -> float:
    """Bits of a number of KV with its share of scales and biases in 16-bit types: a mean over layers and halves."""
    if quantization is None:
        return 16.0
    formats = quantization.list_formats(layers)
    return _mean(_count_bits(half) for each in formats for half in _list_halves(each))


def _list_halves(kv_format: KvFormat) -> tuple[RowFormat, RowFormat]:
    return kv_format.keys, kv_format.values


def _count_bits(row_format: RowFormat) -> float:
    return row_format.bits + SCALE_BITS / row_format.group_size


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
