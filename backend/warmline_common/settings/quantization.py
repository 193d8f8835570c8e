"""Quantization of the KV cache: bits and group sizes of keys and values, by layer, from their settings.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warmline_common.settings.parsers import Value

BITS = (2, 3, 4, 5, 6, 8)  # of mlx's kernels
GROUP_SIZES = (32, 64, 128)
BOUNDARY_LAYERS_MAX = 1000


@dataclass(frozen=True)
class RowFormat:
    """Format of keys or of values: so many bits a number; each group of numbers has a scale and a bias."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class KvFormat:
    """Formats of a layer's keys and values."""

    keys: RowFormat
    values: RowFormat

    @property
    def is_uniform(self) -> bool:
        """True where keys and values have one format."""
        return self.keys == self.values

    @property
    def bits_min(self) -> int:
        return min(self.keys.bits, self.values.bits)

    def __str__(self) -> str:
        """Bits as in the setting: "8", or "8,4"."""
        return str(_format_pair(self.keys.bits, self.values.bits))


@dataclass(frozen=True)
class KvQuantization:
    """Formats of a model's layers: `boundary` for the first and the last `boundary_layers`, `inner` between them."""

    inner: KvFormat
    boundary: KvFormat
    boundary_layers: int = 0

    @property
    def is_uniform(self) -> bool:
        """True where all layers' keys and values have one format."""
        return self.inner.is_uniform and not self.boundary_layers

    @property
    def bits_min(self) -> int:
        """Bits of the coarsest numbers."""
        return min(self.inner.bits_min, self.boundary.bits_min)

    def list_formats(self, layers: int) -> list[KvFormat]:
        """Format of each layer.  Raises ValueError where the boundary leaves no layer between."""
        if self.boundary_layers and 2 * self.boundary_layers >= layers:
            raise ValueError(f"the model has {layers} layers, and none would be between the first and the last")
        ends = [self.boundary] * self.boundary_layers
        return [*ends, *[self.inner] * (layers - 2 * self.boundary_layers), *ends]

    def describe_flags(self) -> str:
        """Flags that ask for it, but for those of group sizes."""
        flags = f"--kv-bits {_format_pair(self.inner.keys.bits, self.inner.values.bits)}"
        if not self.boundary_layers:
            return flags
        bits = _format_pair(self.boundary.keys.bits, self.boundary.values.bits)
        return f"{flags} --kv-boundary-layers {self.boundary_layers} --kv-boundary-bits {bits}"


def make_quantization(
    kv_bits: Value, kv_group_size: Value = 64, kv_boundary_layers: int = 0, kv_boundary_bits: Value = 0
) -> KvQuantization | None:
    """Quantization that parsed settings ask for; None for `kv_bits` 0.  Boundary layers need `kv_boundary_bits`."""
    if not kv_bits:
        return None
    inner = _make_format(kv_bits, kv_group_size)
    boundary = _make_format(kv_boundary_bits, kv_group_size) if kv_boundary_layers and kv_boundary_bits else inner
    return KvQuantization(inner, boundary, kv_boundary_layers if boundary != inner else 0)


def find_quantization_problem(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Name of a setting that does not go with the others, and the reason; two empty texts where all do."""
    layers, bits = settings["kv_boundary_layers"], settings["kv_boundary_bits"]
    if layers and not settings["kv_bits"]:
        return "kv_boundary_layers", "expected kv_bits with it, for the layers between; set kv_bits, or leave it out"
    if layers and not bits:
        return "kv_boundary_layers", 'expected kv_boundary_bits with it, such as 8 or "8,8"'
    if bits and not layers:
        return "kv_boundary_bits", "expected kv_boundary_layers with it, a number of layers such as 2"
    return "", ""


def parse_bits(raw: object) -> Value:
    """Bits of keys and values, 0 for none: a number where they are alike, else "8,4"."""
    return 0 if str(raw) == "0" else _parse_pair(raw, BITS, "bits", "0, or ", "8,4")


def parse_group_size(raw: object) -> Value:
    """Group sizes of keys and values: a number where they are alike, else "64,32"."""
    return _parse_pair(raw, GROUP_SIZES, "", "", "64,32")


def _parse_pair(raw: object, allowed: tuple[int, ...], unit: str, others: str, example: str) -> Value:
    """One number for keys and values, or one for each, as text "8,4" or a TOML array."""
    given = [part.strip() for part in raw.split(",")] if isinstance(raw, str) else raw
    parts = given if isinstance(given, list) else [given]
    numbers = [number for part in parts for number in allowed if str(part) == str(number)]
    if len(numbers) != len(parts) or len(numbers) not in (1, 2):
        choices = ", ".join(map(str, allowed[:-1])) + f" or {allowed[-1]}"
        pair = f'two of these for keys and values, as in "{example}"'
        raise ValueError(f"expected {others}{choices}{f' {unit}' if unit else ''}, or {pair}")
    return _format_pair(numbers[0], numbers[-1])


def _format_pair(keys: int, values: int) -> Value:
    return keys if keys == values else f"{keys},{values}"


def _make_format(bits: Value, group_size: Value) -> KvFormat:
    (keys_bits, values_bits), (keys_group, values_group) = _split_pair(bits), _split_pair(group_size)
    return KvFormat(RowFormat(keys_bits, keys_group), RowFormat(values_bits, values_group))


def _split_pair(value: Value) -> tuple[int, int]:
    """Numbers for keys and values."""
    keys, _, values = str(value).partition(",")
    return int(keys), int(values or keys)
