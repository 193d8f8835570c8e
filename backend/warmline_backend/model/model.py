"""The served model: loaded once, probed, measured.  Engine thread."""

import logging
import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_reduce
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _download, load_adapters, load_tokenizer

from warmline_backend.kv_cache.codecs import CacheLayout, CodecKind, flatten
from warmline_backend.kv_cache.kv import KV, layers_nbytes, select_fields
from warmline_backend.model.drafted_model import DraftedModel, DraftModel, check_tokenizers
from warmline_backend.model.kv_quantization import make_cache_factory, prove_attention
from warmline_backend.model.loader import ModelError, load_lazy_model
from warmline_common.protocol.messages import KvLayout
from warmline_common.protocol.tokens import TokenArray
from warmline_common.settings.hints import FOLDER_ADVICE
from warmline_common.settings.quantization import KvQuantization

log = logging.getLogger(__name__)

PROBE_CHUNK_TOKENS = 8  # of the probe
CONTEXT_KEYS = ("max_position_embeddings", "model_max_length", "max_sequence_length", "seq_length", "n_positions")
FLOATS_COARSEST_FIRST = ("bfloat16", "float16", "float32")
LEARNED_POSITIONS = "wpe.weight"  # GPT-2 and its kin: no other position can be computed
DETAIL_CHARS_MAX = 300  # of another library's error


@dataclass(frozen=True)
class KvSizes:
    """Sizes of a sequence's KV."""

    row_names: frozenset[str]  # "layer.component.field" of every tensor of a segment
    row_bytes: int  # one token's rows over all leaves
    state_bytes: int  # one checkpoint
    window_bytes: int  # the rows of all rotating layers in their full windows
    dtype: str  # of floating values, such as "mlx.core.bfloat16", joined by commas; part of the fingerprint


@dataclass(frozen=True)
class ServedModel(KvSizes):
    """A loaded model with its tokenizer and the sizes of its KV."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    path: Path
    name: str
    layout: CacheLayout
    context_tokens_max: int  # 0: unknown
    vocabulary_size: int
    weight_bytes: int
    index_topk: int  # how many tokens sparse attention selects; 0 where it isn't sparse
    draft: DraftModel | None = None  # whose KV each pass computes, too

    def kv_bytes(self, tokens: int) -> int:
        """KV bytes of a sequence of `tokens`, without padding."""
        return tokens * self.row_bytes + self.state_bytes

    def make_kv(self, *, journals: bool, grid: int = 0) -> KV:
        return KV(self.layout, TokenArray(), self.layout.make_empty_cache(), journal_enabled=journals, grid=grid)

    def describe_layout(self, grid: int = 0) -> KvLayout:
        layout = self.layout
        return KvLayout(
            row_bytes=self.row_bytes,
            state_bytes=self.state_bytes,
            has_rows=self.row_bytes > 0,
            has_states=layout.has_states,
            has_windows=layout.window > 0,
            persistent=not layout.problem,
            families=layout.class_names,
            why_not=layout.problem,
            grid=grid,
            dtype=layout.quantization or _find_coarsest_dtype(self.dtype),
        )


def load_served_model(
    path: str,
    name: str,
    *,
    quantization: KvQuantization | None = None,
    adapter_path: str = "",
    draft_path: str = "",
    trust_remote_code: bool = False,
    before_weights: Callable[[], None] = lambda: None,
) -> ServedModel:
    """Load tokenizer and weights, probe the model with a few tokens, and measure its KV.

    `before_weights` is called once all but the weights is there, and before they take memory.  Raises ModelError, or
    the errors of mlx-lm for a folder without a model.
    """
    folder = _resolve_folder(path, "--model")
    model, config = load_lazy_model(folder, trust_remote_code=trust_remote_code)
    tokenizer = load_model_tokenizer(folder, config, trust_remote_code=trust_remote_code)
    rows = find_vocabulary_size(config, tokenizer)
    draft = open_draft_model(draft_path, tokenizer, rows, trust_remote_code=trust_remote_code) if draft_path else None
    before_weights()
    for each, called in ((model, path), *([(draft.model, draft_path)] if draft is not None else [])):
        _read_weights(each, called)
    if adapter_path:
        model = _load_adapter(model, adapter_path)
    layout = CacheLayout.from_factory(make_cache_factory(model, quantization))
    if layout.problem:
        log.warning("%s is served without persistence: %s", name, layout.problem)
        if draft is not None:
            log.warning("the draft model is not used: the model's cache can't take tokens back")
            draft = None
    if draft is not None:
        log.info("%s drafts tokens", draft.path)
    sizes, model, layout = _measure_model(model, layout, draft, quantization)
    return ServedModel(
        **vars(sizes),
        model=model,
        tokenizer=tokenizer,
        path=folder,
        name=name,
        layout=layout,
        context_tokens_max=find_context_tokens_max(config),
        vocabulary_size=rows,
        weight_bytes=tree_reduce(lambda held, weight: held + weight.nbytes, model.parameters(), 0),
        index_topk=config.get("index_topk") or 0,
        draft=draft,
    )


def _read_weights(model: nn.Module, called: str) -> None:
    try:
        mx.eval(model.parameters())
    except RuntimeError as error:
        command = f"warmline doctor {shlex.quote(called)}"
        raise ModelError(f"its weights can't be read: {error}; `{command}` says which file is damaged") from error


def _measure_model(
    model: nn.Module, layout: CacheLayout, draft: DraftModel | None, quantization: KvQuantization | None
) -> tuple[KvSizes, nn.Module, CacheLayout]:
    """Compute a few tokens, and measure the KV; returns the model and the layout with those of its draft model."""
    probed, whole = (model, layout) if draft is None else pair_models(model, layout, draft)
    try:
        logits, layers = run_probe(probed, whole)
        mx.eval(logits)
    except (RuntimeError, ValueError) as error:  # such as a quantized product that mlx has no kernel for on this device
        remedy = "; leave --kv-bits out, or choose a --kv-group-size that divides the width of the heads"
        problem = f"this device can't compute the model as configured: {error}{remedy if quantization else ''}"
        raise ModelError(problem) from error
    except (AttributeError, LookupError, TypeError) as error:  # of an attention that takes rows for an array
        if quantization is None:
            raise
        detail = _format_error(error)
        raise ModelError(
            f"{quantization.describe_flags()}: the model computes with rows of its cache, which can't be quantized "
            f"then ({detail}); leave --kv-bits out"
        ) from error
    return measure_pair(layout, whole, layers), probed, whole


def open_draft_model(
    path: str, tokenizer: TokenizerWrapper, vocabulary_size: int, *, trust_remote_code: bool
) -> DraftModel:
    """Draft model of a folder or repository, with its weights unread.

    Raises ModelError unless it suits the model with this tokenizer, whose embedding has `vocabulary_size` rows.
    """
    folder = _resolve_folder(path, "--draft-model")
    try:
        model, config = load_lazy_model(folder, trust_remote_code=trust_remote_code)
        own_tokenizer = load_model_tokenizer(folder, config, trust_remote_code=trust_remote_code)
        rows = find_vocabulary_size(config, own_tokenizer)
        check_tokenizers(tokenizer, own_tokenizer, vocabulary_size, rows)
        if any(name.endswith(LEARNED_POSITIONS) for name, _ in tree_flatten(model.parameters())):
            raise ModelError("its positions are learned, and end with its context; choose another draft model")
        layout = CacheLayout.from_factory(make_cache_factory(model, None))
        if layout.problem:
            raise ModelError(f"{layout.problem}, and a draft model's KV is kept beside the model's; choose another one")
    except (ModelError, ValueError, OSError) as error:
        raise ModelError(f"--draft-model {path}: {error}") from error
    return DraftModel(model, folder, layout, rows, find_context_tokens_max(config))


def pair_models(model: nn.Module, layout: CacheLayout, draft: DraftModel) -> tuple[nn.Module, CacheLayout]:
    """The model with its draft model, and the layout of the cache of both."""
    paired = DraftedModel(model, layout, draft)
    return paired, CacheLayout.from_factory(paired.make_cache)


def _load_adapter(model: nn.Module, adapter_path: str) -> nn.Module:
    """Load an adapter into the model.  Raises ModelError, OSError."""
    try:
        model = load_adapters(model, adapter_path)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever mlx-lm and mlx raise on files that are none of an adapter for this model
        raise ModelError(
            f"--adapter-path {adapter_path}: not an adapter for this model, as mlx_lm.lora writes them "
            f"({type(error).__name__}: {error})"
        ) from error
    model.eval()
    return model


def load_model_tokenizer(folder: Path, config: dict[str, Any], *, trust_remote_code: bool) -> TokenizerWrapper:
    """Load the tokenizer of a folder; `config` is mlx-lm's reading of config.json.  Raises ModelError."""
    settings = {"trust_remote_code": True} if trust_remote_code else None
    try:
        tokenizer = load_tokenizer(folder, settings, eos_token_ids=config.get("eos_token_id"))
        tokenizer.encode("a")  # some settings are only looked at then
        return tokenizer
    except Exception as error:  # transformers raises whatever its classes happen to
        if "trust_remote_code" in str(error):
            todo = "pass --trust-remote-code, which runs the tokenizer's own code, if you trust it"
        elif type(error).__name__.startswith("StrictDataclass"):  # transformers checks what it reads
            todo = "take config.json from the model's repository"
        else:
            todo = "download the tokenizer's files again: tokenizer.json, tokenizer_config.json"
        raise ModelError(f"the tokenizer can't be loaded; {todo} ({_format_error(error)})") from error


def _format_error(error: Exception) -> str:
    """Format another library's error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:DETAIL_CHARS_MAX]}"


def expand_path(name: str) -> Path:
    """Path of a name, which need not exist; ~ is expanded.  Raises OSError, RuntimeError, ValueError where none can."""
    path = Path(name).expanduser()
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()  # `exists` hides other errors, from Python 3.14 on
    return path


def _resolve_folder(path: str, flag: str) -> Path:
    """Local folder of a path or repository id, given by `flag`.  Raises ModelError."""
    try:
        local = expand_path(path)
    except (OSError, RuntimeError, ValueError) as error:  # no such user's home, a name that is too long ...
        raise ModelError(f"{flag} {path[:200]}: no folder can be called so: {error}") from error
    if local.exists():
        if not (local / "config.json").is_file():
            raise ModelError(f"{flag} {path}: not a model's folder, it has no config.json; {FOLDER_ADVICE}")
        return local
    if not can_be_repository(path):
        raise ModelError(f"{flag} {path}: there is no such folder; {FOLDER_ADVICE}")
    try:
        return Path(_download(path))
    except Exception as error:  # the hub's client and its own HTTP client raise whatever happens to them
        raise ModelError(
            f"{flag} {path}: neither a folder here nor in the hub's cache, and it could not be downloaded "
            f"({_format_error(error)}); `hf download {path}` says more"
        ) from error


def can_be_repository(name: str) -> bool:
    """True for a name that could be a repository's, owner/model."""
    return not name.startswith(("/", ".", "~")) and name.count("/") == 1


def run_probe(model: nn.Module, layout: CacheLayout) -> tuple[list[mx.array], list[Any]]:
    """Logits of a chunk and of a step after it, and the cache that they fill; lazy: no weight is read.

    Raises ModelError where attention would not read the cache as it is quantized.
    """
    layers = layout.make_empty_cache()
    chunk, step = list(range(1, PROBE_CHUNK_TOKENS + 1)), [1]
    with prove_attention(layers):
        return [model(mx.array([tokens]), cache=layers) for tokens in (chunk, step)], layers


def measure_kv(layout: CacheLayout, layers: list[Any]) -> KvSizes:
    """Measure KV by the shapes of a `run_probe` cache, computed or not; computes nothing itself."""
    length = PROBE_CHUNK_TOKENS + 1
    if layout.problem:
        return KvSizes(frozenset(), layers_nbytes(layers) // length, 0, 0, "")
    rows: dict[str, mx.array] = {}
    states: dict[str, mx.array] = {}
    for leaf, (_, held) in zip(layout.leaves, flatten(layers), strict=True):
        if leaf.codec.kind is CodecKind.STATE:
            states |= {f"{leaf.name}.{field}": array for field, array in leaf.codec.state(held, 0).items()}
        else:
            fields = leaf.codec.rows(held, 0, length, 0, length)
            rows |= {f"{leaf.name}.{field}": array for field, array in fields.items()}
    dtypes = {str(array.dtype) for array in (*rows.values(), *states.values())}
    return KvSizes(
        row_names=frozenset(rows),
        row_bytes=sum(array.nbytes for array in rows.values()) // length,
        state_bytes=sum(array.nbytes for array in states.values()),
        window_bytes=sum(
            sum(array.nbytes for array in select_fields(rows, leaf.name).values()) // length * leaf.template.max_size
            for leaf in layout.leaves_of_kind(CodecKind.WINDOW)
        ),
        dtype=",".join(sorted(dtypes)),
    )


def measure_pair(layout: CacheLayout, whole: CacheLayout, layers: list[Any]) -> KvSizes:
    """Measure KV of `whole`, the layout of a model or of it with a draft model.

    The type is that of the model's own `layout`, which decides how its answers round.
    """
    own = measure_kv(layout, layers[: len(layout.template)])
    return replace(measure_kv(whole, layers), dtype=own.dtype)


def _find_coarsest_dtype(dtypes: str) -> str:
    """The coarsest type in "mlx.core.bfloat16,mlx.core.float32" and the like; "" for none."""
    return next((name for name in FLOATS_COARSEST_FIRST if name in dtypes.replace("mlx.core.", "").split(",")), "")


def find_context_tokens_max(config: dict[str, Any]) -> int:
    """Context length of a config; 0 where it names none."""
    parts = (config, config.get("text_config") or {})
    values = (part.get(key) for part in parts for key in CONTEXT_KEYS)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def find_vocabulary_size(config: dict[str, Any], tokenizer: TokenizerWrapper) -> int:
    values = (part.get("vocab_size") for part in (config, config.get("text_config") or {}))
    return next((value for value in values if isinstance(value, int)), len(tokenizer.get_vocab()))


@dataclass(frozen=True)
class MemoryLimits:
    """Memory that a backend reckons with.

    What is derived for good goes by the first two: it may not depend on which other models are loaded.
    """

    machine_bytes: int  # for the model and all else
    budget_bytes: int  # of it, for residents and running requests
    usable_bytes: int  # of it, at first: other models may have the rest


def get_device_name() -> str:
    """Name of the computing device, for people."""
    return str(mx.device_info().get("device_name", "this machine"))


def get_machine_bytes() -> int:
    """Bytes of memory for a model and its KV on this machine."""
    info = mx.device_info()
    sizes = (info.get(name) for name in ("max_recommended_working_set_size", "total_memory", "memory_size"))
    total = next((int(size) for size in sizes if size), 0)  # Metal's, CUDA's; none on a CPU
    return total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
