"""GLM-5 and GLM-5.2 (`glm_moe_dsa`): latent attention over the tokens that an indexer selects, and experts.

An *indexer* scores all earlier tokens and selects `index_topk` of them for each query.  In GLM-5.2 only some layers
have one ("full"); the others ("shared") attend to what the nearest full layer before them selected.  The architecture
is that of `GlmMoeDsaForCausalLM` in transformers, which the golden tests hold it to; what is the same in DeepSeek V3.2
comes from mlx-lm.

Where a query may see `GATHERED_FROM` times as many tokens as are selected, the selected rows are gathered and nothing
else is read; below that, all rows are multiplied and the others masked, which is faster there.  What grows with queries
times tokens is done a few queries at a time.
"""

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache
from mlx_lm.models.deepseek_v32 import DeepseekV32MLP, DeepseekV32MoE
from mlx_lm.models.deepseek_v32 import Model as DeepseekV32
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.pipeline import PipelineMixin
from mlx_lm.models.rope_utils import initialize_rope

log = logging.getLogger(__name__)

FULL, SHARED = "full", "shared"
NORM_EPS = 1e-6  # of the latent's norms and the indexer's, whatever `rms_norm_eps` says
GATHERED_FROM = 2  # times index_topk: 512 products a row and head against 1,088 a selected one, in GLM-5.2's sizes
BLOCK_BYTES = 256 << 20  # what a block of queries may take, gathered rows or scores
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
    """Raises ValueError where a value is of another type, out of range, or asks for what is not done here."""
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
    """ "full" or "shared" for each layer: as config.json lists them, else by its pattern, else by its frequency.

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


def _scale(args: ModelArgs) -> float:
    scale = float((args.qk_nope_head_dim + args.qk_rope_head_dim) ** -0.5)
    rope = args.rope_parameters or {}
    factor, weight = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") != "default" and weight and factor > 1:
        scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
    return scale


def _rope(args: ModelArgs, interleaved: bool) -> nn.Module:
    rope: nn.Module = initialize_rope(
        args.qk_rope_head_dim, args.rope_theta, interleaved, args.rope_parameters, args.max_position_embeddings
    )
    return rope


def _blocks(queries: int, bytes_per_query: int) -> Iterator[slice]:
    """Slices of the queries that take at most BLOCK_BYTES each."""
    size = max(1, BLOCK_BYTES // bytes_per_query)
    for start in range(0, queries, size):
        yield slice(start, min(start + size, queries))


@partial(mx.compile, shapeless=True)  # the number of keys is another each time
def _add_head(total: mx.array, scores: mx.array, weight: mx.array) -> mx.array:
    return total + mx.maximum(scores, 0) * weight


class Indexer(nn.Module):  # type: ignore[misc]
    """Selects the tokens that each query attends to."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.topk = args.index_n_heads, args.index_head_dim, args.index_topk
        self.wq_b = nn.Linear(args.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS)
        self.weights_proj = nn.Linear(args.hidden_size, self.n_heads, bias=False)
        self.rope = _rope(args, args.indexer_rope_interleave)

    def __call__(self, x: mx.array, q_latent: mx.array, mask: mx.array | None, cache: Any) -> mx.array | None:
        """Indices (B, L, topk) into the keys so far, or None while there are no more than `topk` of them.

        x is (B, L, hidden), `mask` true where a query may look: (B or 1, 1, L, keys) or (L, keys); None: everywhere.
        """
        batch, length, _ = x.shape
        offset = cache.offset if cache is not None else 0
        keys = self.rope(self.k_norm(self.wk(x))[:, None], offset=offset)
        if cache is not None:
            keys, _ = cache.update_and_fetch(keys, keys[..., :0])  # the selection needs no values
        count = keys.shape[2]
        if count <= self.topk:
            return None
        queries = self.wq_b(q_latent).reshape(batch, length, self.n_heads, self.head_dim).swapaxes(1, 2)
        # Float32, as in the reference: 16 bits would tell too few scores apart.
        queries = self.rope(queries, offset=offset).astype(mx.float32)
        keys = keys.astype(mx.float32).swapaxes(-1, -2)
        weights = self.weights_proj(x.astype(mx.float32)) * (self.n_heads * self.head_dim) ** -0.5
        selected = []
        for block in _blocks(length, batch * count * 4 * (self.n_heads if length == 1 else 1)):
            scores = self._scores(queries[:, :, block], keys, weights[:, block])
            if mask is not None:
                scores = mx.where(mask[..., block, :], scores, -mx.inf)
            selected.append(mx.argpartition(scores, kth=-self.topk, axis=-1)[:, 0, :, -self.topk :])
        return mx.stop_gradient(mx.concatenate(selected, axis=1))

    def _scores(self, queries: mx.array, keys: mx.array, weights: mx.array) -> mx.array:
        """(B, 1, L, keys).  Many queries head by head: all at once would be `n_heads` times as large."""
        if queries.shape[2] == 1:
            return (mx.maximum(queries @ keys, 0) * weights.swapaxes(-1, -2)[..., None]).sum(axis=1, keepdims=True)
        total = mx.zeros((*queries.shape[:1], 1, queries.shape[2], keys.shape[-1]), mx.float32)
        for head in range(self.n_heads):
            total = _add_head(total, queries[:, head : head + 1] @ keys, weights[:, None, :, head : head + 1])
        return total


class Attention(nn.Module):  # type: ignore[misc]
    """Multi-head latent attention: of each token a latent vector and one rotated key are kept, shared by all heads."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.num_heads = args.num_attention_heads
        self.nope_dim, self.rope_dim = args.qk_nope_head_dim, args.qk_rope_head_dim
        self.latent_dim, self.topk = args.kv_lora_rank, args.index_topk
        self.scale = _scale(args)
        self.q_a_proj = nn.Linear(args.hidden_size, args.q_lora_rank, bias=args.attention_bias)
        self.q_a_layernorm = nn.RMSNorm(args.q_lora_rank, eps=NORM_EPS)
        self.q_b_proj = nn.Linear(args.q_lora_rank, self.num_heads * (self.nope_dim + self.rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(args.hidden_size, self.latent_dim + self.rope_dim, bias=args.attention_bias)
        self.kv_a_layernorm = nn.RMSNorm(self.latent_dim, eps=NORM_EPS)
        self.embed_q = MultiLinear(self.nope_dim, self.latent_dim, self.num_heads)
        self.unembed_out = MultiLinear(self.latent_dim, args.v_head_dim, self.num_heads)
        self.o_proj = nn.Linear(self.num_heads * args.v_head_dim, args.hidden_size, bias=args.attention_bias)
        self.rope = _rope(args, True)
        assert args.indexer_types is not None
        if args.indexer_types[layer] == FULL:
            self.indexer = Indexer(args)

    def __call__(
        self, x: mx.array, mask: mx.array | None, cache: Any, selected: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """The output (B, L, hidden), and the selection for the layers after this one.

        `selected` is that of the last full layer; a full layer makes its own.
        """
        batch, length, _ = x.shape
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        queries = self.q_b_proj(q_latent).reshape(batch, length, self.num_heads, -1).swapaxes(1, 2)
        q_nope, q_rope = mx.split(queries, [self.nope_dim], axis=-1)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x)[:, None], [self.latent_dim], axis=-1)
        offset = cache[0].offset if cache is not None else 0
        q_rope, k_rope = self.rope(q_rope, offset=offset), self.rope(k_rope, offset=offset)
        latent = self.kv_a_layernorm(latent)
        if cache is not None:
            latent, k_rope = cache[0].update_and_fetch(latent, k_rope)
        if "indexer" in self:
            own = cache[1] if cache is not None else None
            selected = self.indexer(x, q_latent, mask, own)
            if own is not None:  # its keys are computed with this layer even where nothing is selected yet
                cache[0].keys = mx.depends(cache[0].keys, (own.keys, own.values))
        if selected is None:
            output = self._attend_all(q_nope, q_rope, latent, k_rope, mask)
        elif length > 1 and latent.shape[2] < GATHERED_FROM * self.topk:
            output = self._attend_all(q_nope, q_rope, latent, k_rope, _only(selected, latent.shape[2], mask))
        else:
            output = self._attend_selected(q_nope, q_rope, latent, k_rope, mask, selected)
        return self.o_proj(output.swapaxes(1, 2).reshape(batch, length, -1)), selected

    def _attend_all(
        self, q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, mask: mx.array | None
    ) -> mx.array:
        """(B, heads, L, v_head_dim): every query attends to all rows that `mask` lets it see."""
        scores = (q_rope * self.scale) @ k_rope.swapaxes(-1, -2)
        if mask is not None:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        if q_nope.shape[2] == 1:  # the query into the latent space: less work than all keys out of it
            q_nope, keys, values = self.embed_q(q_nope), latent, latent
        else:
            keys, values = self.embed_q(latent, transpose=False), self.unembed_out(latent)
        output = mx.fast.scaled_dot_product_attention(q_nope, keys, values, scale=self.scale, mask=scores)
        return self.unembed_out(output) if keys is latent else output

    def _attend_selected(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        k_rope: mx.array,
        mask: mx.array | None,
        selected: mx.array,
    ) -> mx.array:
        """(B, heads, L, v_head_dim): every query attends to its selected rows, in the latent space."""
        batch, _, length, _ = q_nope.shape
        q_nope = self.embed_q(q_nope).swapaxes(1, 2)  # (B, L, heads, latent)
        q_rope = q_rope.swapaxes(1, 2)
        row_bytes = (self.latent_dim + self.rope_dim) * latent.dtype.size
        outputs = []
        for block in _blocks(length, batch * self.topk * row_bytes):
            chosen = selected[:, block]
            rows, rotated = _gather(latent, chosen), _gather(k_rope, chosen)  # (B, block, topk, width)
            scores = q_nope[:, block] @ rows.swapaxes(-1, -2) + q_rope[:, block] @ rotated.swapaxes(-1, -2)
            scores = scores * self.scale
            if mask is not None:  # where fewer rows than topk may be seen, others were selected as well
                scores = mx.where(_seen(mask, block, chosen), scores, mx.finfo(scores.dtype).min)
            outputs.append(mx.softmax(scores, axis=-1, precise=True) @ rows)
        output: mx.array = self.unembed_out(mx.concatenate(outputs, axis=1).swapaxes(1, 2))
        return output


def _gather(rows: mx.array, chosen: mx.array) -> mx.array:
    """Rows (B, 1, keys, width) by indices (B, L, topk), as (B, L, topk, width); whole rows are copied at once."""
    return mx.stack([mx.take(rows[i, 0], chosen[i], axis=0) for i in range(chosen.shape[0])])


def _seen(mask: mx.array, block: slice, chosen: mx.array) -> mx.array:
    """(B, L, 1, topk): of the chosen rows, those that each query may look at."""
    rows = mask[..., block, :]
    rows = mx.broadcast_to(rows.reshape(-1, *rows.shape[-2:]), (*chosen.shape[:2], rows.shape[-1]))
    return mx.take_along_axis(rows, chosen, axis=-1)[:, :, None]


def _only(selected: mx.array, count: int, mask: mx.array | None) -> mx.array:
    """A mask (B, 1, L, count) of the selected rows, as far as `mask` lets them be seen."""
    chosen = mx.put_along_axis(mx.zeros((*selected.shape[:2], count), mx.bool_), selected, mx.array(True), axis=-1)
    return chosen[:, None] if mask is None else chosen[:, None] & mask


@mx.compile
def _route(
    gates: mx.array, bias: mx.array, top_k: int, groups: int, top_groups: int, normalize: bool, factor: float
) -> tuple[mx.array, mx.array]:
    """The experts of each token and their weights: by sigmoid, with a bias that only decides who is chosen."""
    weights = mx.sigmoid(gates)
    choice = weights + bias
    if top_groups < groups:  # only experts of the best groups
        grouped = mx.unflatten(choice, axis=-1, shape=(groups, -1))
        best = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
        left_out = groups - top_groups
        others = mx.argpartition(best, kth=left_out - 1, axis=-2)[..., :left_out, :]
        choice = mx.flatten(mx.put_along_axis(grouped, others, mx.array(-mx.inf), axis=-2), -2, -1)
    experts = mx.argpartition(-choice, kth=top_k - 1, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(weights, experts, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, weights * factor


class Router(nn.Module):  # type: ignore[misc]
    """Chooses the experts of each token, in float32 as the reference does."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.weight = mx.zeros((args.n_routed_experts, args.hidden_size))
        self.e_score_correction_bias = mx.zeros((args.n_routed_experts,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        args = self.args
        routed: tuple[mx.array, mx.array] = _route(
            x.astype(mx.float32) @ self.weight.astype(mx.float32).T,
            self.e_score_correction_bias,
            args.num_experts_per_tok,
            args.n_group,
            args.topk_group,
            args.norm_topk_prob,
            args.routed_scaling_factor,
        )
        return routed


class Experts(DeepseekV32MoE):  # type: ignore[misc]
    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.gate = Router(args)


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        assert args.mlp_layer_types is not None
        self.self_attn = Attention(args, layer)
        self.mlp = Experts(args) if args.mlp_layer_types[layer] == "sparse" else DeepseekV32MLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(
        self, x: mx.array, mask: mx.array | None, cache: Any, selected: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        attended, selected = self.self_attn(self.input_layernorm(x), mask, cache, selected)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), selected


class Layers(PipelineMixin, nn.Module):  # type: ignore[misc]
    """Embedding, layers, norm.  In a pipeline each rank has some consecutive layers, the last rank the first ones."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        assert args.indexer_types is not None
        self.indexer_types = args.indexer_types
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args, layer) for layer in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, tokens: mx.array, cache: list[Any] | None) -> mx.array:
        x = self.embed_tokens(tokens)
        caches = cache if cache is not None else [None] * len(self.pipeline_layers)
        mask = create_attention_mask(x, caches[0] and caches[0][0], return_array=True)
        if self.pipeline_rank < self.pipeline_size - 1:
            x = mx.distributed.recv_like(x, self.pipeline_rank + 1)
        selected = None
        for layer, held in zip(self.pipeline_layers, caches, strict=True):
            x, selected = layer(x, mask, held, selected)
        if self.pipeline_rank:
            x = mx.distributed.send(x, self.pipeline_rank - 1)
            if cache is not None:  # whoever evaluates the cache has sent
                cache[-1][0].keys = mx.depends(cache[-1][0].keys, x)
        if self.pipeline_size > 1:
            x = mx.distributed.all_gather(x)[: x.shape[0]]
        normed: mx.array = self.norm(x)
        return normed

    def pipeline(self, group: Any, split: list[int] | None = None) -> None:
        """Keep this rank's layers.  Each rank starts with a full layer, since a selection does not travel.

        Raises ValueError for a `split` (layers by rank) that starts a rank with a shared layer.
        """
        super().pipeline(group, split if split is not None else split_at_full(self.indexer_types, group.size()))
        if self.indexer_types[self.start_idx] == SHARED:
            raise ValueError(
                f"split {split} starts a rank with layer {self.start_idx}, which shares the selection of a layer "
                "before it; start ranks with layers that are full in indexer_types"
            )


def split_at_full(types: list[str], ranks: int) -> list[int]:
    """How many layers each rank has, as even as full layers allow; rank 0 has the last ones.

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


class Model(DeepseekV32):  # type: ignore[misc]
    """The language model.  Sharding over a group, and most of the weights' names, are mlx-lm's DeepSeek V3.2's."""

    def __init__(self, args: ModelArgs) -> None:
        nn.Module.__init__(self)
        self.args = args
        self.model_type = args.model_type
        self.model = Layers(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The checkpoint's names and shapes to ours.

        The layer after the last predicts further tokens; the reference leaves it out, so it is left out here.
        """
        layers = self.args.num_hidden_layers
        skipped = {name for name in weights if _layer_of(name) == layers}
        if skipped:
            log.info(
                "%d parameters of model.layers.%d.* left out, as in the reference: they predict further tokens",
                len(skipped),
                layers,
            )
        beyond = {name: weights[name] for name in weights if _layer_of(name) > layers}
        known = {name: array for name, array in weights.items() if name not in skipped and name not in beyond}
        for name in [name for name in known if name.endswith(".kv_b_proj.scales")]:
            if name.removesuffix("scales") + "biases" not in known:
                _dequantize(known, name.removesuffix(".scales"))
        return {**super().sanitize(known), **beyond}  # what is beyond is no parameter of ours: for loading to tell

    def make_cache(self) -> list[CacheList]:
        """Latents and rotated keys of each layer; where it has an indexer, its keys as well."""
        return [
            CacheList(KVCache(), KVCache()) if "indexer" in layer.self_attn else CacheList(KVCache())
            for layer in self.layers
        ]


def _dequantize(weights: dict[str, mx.array], prefix: str) -> None:
    """A product in one of the modes without biases to floats, for `sanitize` to take apart."""
    packed, scales = weights[f"{prefix}.weight"], weights.pop(f"{prefix}.scales")
    # Groups are of 32, but of 16 in nvfp4; a scale's group packs into as many words as its bits say.
    words = packed.shape[-1] // scales.shape[-1]
    mode, group_size, bits = {2: ("nvfp4", 16, 4), 4: ("mxfp4", 32, 4), 8: ("mxfp8", 32, 8)}[words]
    weights[f"{prefix}.weight"] = mx.dequantize(packed, scales, group_size=group_size, bits=bits, mode=mode)


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and parts[2].isdigit() else -1
