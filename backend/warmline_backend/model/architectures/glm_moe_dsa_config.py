"""config.json of a `glm_moe_dsa` model: checks of its values, and layers that select for themselves.  Pure."""

import json
import math
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from mlx_lm.models.base import BaseModelArgs

FULL, SHARED = "full", "shared"  # a layer that selects, and one that attends to what another has selected
_INT32_MAX = (1 << 31) - 1  # what mlx counts in
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
_KINDS |= {list: "a list", dict: "an object"}
_LEAST = {"first_k_dense_replace": 0, "index_topk_freq": 0, "index_skip_topk_offset": 0}  # of the others 1


@dataclass
class ModelArgs(BaseModelArgs):  # type: ignore[misc]
    """config.json.  Raises ValueError where it contradicts itself."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_head_dim: int
    index_n_heads: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    mlp_layer_types: list[str] | None = None
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None
    indexer_rope_interleave: bool = True
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 202752
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None  # what older configurations call them
    rope_theta: float | None = None
    attention_bias: bool = False
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    topk_method: str = "noaux_tc"  # mlx-lm's expert layer asks for it

    def __post_init__(self) -> None:
        _check_values(self)
        rope = self.rope_scaling or self.rope_parameters or {}
        theta: Any = rope.get("rope_theta", self.rope_theta)
        if type(theta) not in (int, float) or not 0 < theta < math.inf:
            raise _unexpected("rope_theta (of rope_parameters)", theta, "a number above 0")
        self.rope_theta = float(theta)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        self.rope_parameters = {**rope, "rope_type": kind, "rope_theta": self.rope_theta}
        self.indexer_types = indexer_types(self)
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        self.mlp_layer_types = self.mlp_layer_types or ["dense"] * dense + ["sparse"] * (self.num_hidden_layers - dense)
        _check_layers("mlp_layer_types", self.mlp_layer_types, self.num_hidden_layers, ("dense", "sparse"))


def _check_values(args: ModelArgs) -> None:
    """Raise ValueError where a value has another type, is out of range, or asks for what is not implemented."""
    for field in fields(args):
        value = getattr(args, field.name)
        choices = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        kinds = [get_origin(kind) or kind for kind in choices]
        least = _LEAST.get(field.name, 1)
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            raise _unexpected(field.name, value, " or ".join(_KINDS[kind] for kind in kinds))
        if type(value) is int and int in kinds and not least <= value <= _INT32_MAX:
            raise _unexpected(field.name, value, f"{least} or more, and less than 2**31")
        if type(value) is float and not math.isfinite(value):
            raise _unexpected(field.name, value, "a number")
    if args.hidden_act != "silu":
        raise _unexpected("hidden_act", args.hidden_act, "silu: nothing else is computed here")
    if args.tie_word_embeddings:
        raise _unexpected("tie_word_embeddings", True, "false: the model has an output matrix of its own")
    _check_experts(args)


def _check_experts(args: ModelArgs) -> None:
    experts, groups = args.n_routed_experts, args.n_group
    choice = experts if args.topk_group >= groups else args.topk_group * (experts // groups)
    if args.num_experts_per_tok > choice:
        expected = f"at most {choice}, as n_routed_experts, n_group and topk_group have it"
        raise _unexpected("num_experts_per_tok", args.num_experts_per_tok, expected)
    if experts % groups or (choice < experts and experts < 2 * groups):
        raise _unexpected("n_group", groups, f"a number of groups of two or more that {experts} experts divide into")


def _unexpected(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name} in config.json is {json.dumps(value)}; expected {expected}")


def indexer_types(args: ModelArgs) -> list[str]:
    """Kind of each layer ("full", "shared"): config.json's list, else its pattern, else its frequency.

    Raises ValueError for a list that can't be meant.
    """
    if args.indexer_types is not None:
        types, source = list(args.indexer_types), "indexer_types"
    elif args.index_topk_pattern is not None:
        letters = {"F": FULL, "S": SHARED}
        types = [letters.get(str(letter), letter) for letter in args.index_topk_pattern]
        source = "index_topk_pattern"
    else:
        every = max(args.index_topk_freq or 1, 1)
        offset = 2 if args.index_skip_topk_offset is None else args.index_skip_topk_offset
        types = [FULL if max(i - offset + 1, 0) % every == 0 else SHARED for i in range(args.num_hidden_layers)]
        source = "index_topk_freq and index_skip_topk_offset"
    _check_layers(source, types, args.num_hidden_layers, (FULL, SHARED))
    if types[0] == SHARED:
        raise ValueError(f'{source} in config.json: layer 0 is "shared", but there is no layer before it to share with')
    return types


def _check_layers(name: str, types: list[str], layers: int, known: tuple[str, str]) -> None:
    if len(types) != layers:
        raise ValueError(f"{name} in config.json has {len(types)} entries for {layers} layers (num_hidden_layers)")
    if unknown := sorted({str(word) for word in types if word not in known}):
        raise ValueError(f"{name} in config.json says {', '.join(unknown)}; expected {known[0]} or {known[1]}")


def split_at_full(types: list[str], ranks: int) -> list[int]:
    """Layers of each rank, as even as full layers allow; rank 0 has the last ones.

    Raises ValueError where there are fewer full layers than ranks.
    """
    full = [layer for layer, kind in enumerate(types) if kind == FULL]
    if len(full) < ranks:
        raise ValueError(f"{len(full)} full layers can't start {ranks} ranks; use {len(full)} or fewer")
    starts = [0]
    for rank in range(1, ranks):
        open_to = full[full.index(starts[-1]) + 1 : len(full) - (ranks - rank - 1)]
        starts.append(min(open_to, key=lambda layer: abs(layer - rank * len(types) / ranks)))
    ends = [*starts[1:], len(types)]
    return [end - start for start, end in zip(starts, ends, strict=True)][::-1]
