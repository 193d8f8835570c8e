"""Formats of quantized KV, from their settings."""

import pytest

from warmline_backend.config import BackendConfigError, parse_config
from warmline_common.settings.quantization import (
    KvFormat,
    RowFormat,
    make_quantization,
    parse_bits,
    parse_group_size,
)
from warmline_common.settings.table import format_flags


@pytest.mark.parametrize(
    ("raw", "value"),
    [(8, 8), ("8", 8), ("8,8", 8), ([4, 4], 4), (" 8 , 4 ", "8,4"), ([8, 4], "8,4"), ("2,3", "2,3"), (0, 0), ("0", 0)],
)
def test_bits_have_one_spelling(raw: object, value: object) -> None:
    assert parse_bits(raw) == value
    if isinstance(value, str):
        assert parse_bits(value) == value


@pytest.mark.parametrize("raw", ["8,", ",4", "8,4,2", [8, 4, 2], [], "7", 8.0, None, "8;4", True, "0,0", 16])
def test_other_bits_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match=r'^expected 0, or 2, 3, 4, 5, 6 or 8 bits, or two of these .* "8,4"$'):
        parse_bits(raw)


def test_formats_by_layer() -> None:
    quantization = make_quantization("8,4", parse_group_size("64,32"), 2, "8,6")
    assert quantization is not None
    inner, boundary = (KvFormat(RowFormat(8, 64), RowFormat(bits, 32)) for bits in (4, 6))
    assert quantization.list_formats(6) == [boundary, boundary, inner, inner, boundary, boundary]
    assert (quantization.bits_min, quantization.is_uniform) == (4, False)
    with pytest.raises(ValueError, match="the model has 4 layers, and none would be between"):
        quantization.list_formats(4)
    assert quantization.describe_flags() == "--kv-bits 8,4 --kv-boundary-layers 2 --kv-boundary-bits 8,6"
    assert make_quantization(8, 64, 2, 8) == make_quantization(8), "boundary layers like all others are none"
    assert make_quantization(0, 64, 2, 8) is None


def test_backend_takes_formats() -> None:
    flags = ["--home", "/h", "--model", "m", "--kv-bits", "8,4", "--kv-boundary-layers", "2"]
    config = parse_config([*flags, "--kv-boundary-bits", "8"])
    assert config.kv_quantization == make_quantization("8,4", 64, 2, 8)
    with pytest.raises(
        BackendConfigError, match=r"^--kv-boundary-layers 2: expected --kv-boundary-bits with it, such as"
    ):
        parse_config(flags)
    values: dict[str, object] = {"kv_bits": "8,4", "kv_boundary_layers": 2, "kv_boundary_bits": 0}
    written = format_flags("doctor", lambda name: values.get(name, ""))  # type: ignore[arg-type,return-value]
    assert written == ["--kv-bits", "8,4", "--kv-boundary-layers", "2"]
