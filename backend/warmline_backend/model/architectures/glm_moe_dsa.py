"""GLM-5 and GLM-5.2 (`glm_moe_dsa`): latent attention over the tokens that an indexer selects, and experts.

An *indexer* scores all earlier tokens and selects `index_topk` of them for each query.  In GLM-5.2 only some layers
have one ("full"); the others ("shared") attend to what the nearest full layer before them selected.  The architecture
is that of `GlmMoeDsaForCausalLM` in transformers, which the golden tests hold it to; what is the same in DeepSeek V3.2
comes from mlx-lm.

Where a query may see `GATHERED_FROM` times as many tokens as are selected, the selected rows are gathered and nothing
else is read; below that, all rows are multiplied and the others masked, which is faster there.  What grows with queries
times tokens is done a few queries at a time.
"""

import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache
from mlx_lm.models.deepseek_v32 import DeepseekV32MLP, DeepseekV32MoE
from mlx_lm.models.deepseek_v32 import Model as DeepseekV32
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.pipeline import PipelineMixin
from mlx_lm.models.rope_utils import initialize_rope

from warmline_backend.model.architectures.glm_moe_dsa_config import FULL, SHARED, ModelArgs, split_at_full

__all__ = ["Model", "ModelArgs"]

log = logging.getLogger(__name__)

NORM_EPS = 1e-6  # of the latent's norms and the indexer's, whatever `rms_norm_eps` says
GATHERED_FROM = 2  # times index_topk: 512 products a row and head against 1,088 a selected one, in GLM-5.2's sizes
BLOCK_BYTES = 256 << 20  # what a block of queries may take, gathered rows or scores


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
    """Selection of the tokens that each query attends to."""

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
    """Selection of each token's experts, in float32 as in the reference."""

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
