"""GLM against the reference's logits, at all positions up to four times the number that the indexer selects."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList

from support.glm.golden_glm import assert_equals_reference, build_model, compute_in_chunks, read_golden
from support.glm.recipe import CASES, TOKENS, TOPK
from support.glm.recipe import make_tokens as tokens_of
from warmline_backend.model.architectures import glm_moe_dsa

each_case = pytest.mark.parametrize("case", CASES)


def test_contexts_exceed_selection() -> None:
    assert TOKENS >= 4 * TOPK
    for case in CASES:
        assert read_golden(case, "logits").shape == (TOKENS, 64)
        assert read_golden(case, "tokens").tolist() == tokens_of(case)


@each_case
def test_indexer_types_match_reference(case: str) -> None:
    assert build_model(case).args.indexer_types == read_golden(case, "indexer_types").tolist()


@each_case
def test_single_prefill_matches_reference(case: str) -> None:
    assert_equals_reference(case, build_model(case)(mx.array([tokens_of(case)]))[0])


@each_case
@pytest.mark.parametrize("size", [20, 64])
def test_chunked_prefill_matches_reference(case: str, size: int) -> None:
    assert_equals_reference(case, compute_in_chunks(build_model(case), tokens_of(case), size))


AROUND = [each + more for each in (TOPK, 2 * TOPK) for more in (-1, 0, 1)]  # where selecting begins, and gathering


@pytest.mark.parametrize("size", AROUND)
def test_chunks_ending_near_topk_match_reference(size: int) -> None:
    assert_equals_reference(
        "shared_as_listed", compute_in_chunks(build_model("shared_as_listed"), tokens_of("shared_as_listed"), size)
    )


@pytest.mark.parametrize("position", AROUND)
def test_truncated_cache_matches_reference(position: int) -> None:
    """The cache is cut as in a restored or branched conversation, continued by one token or by a chunk."""
    case = "shared_as_listed"
    made, prompt = build_model(case), tokens_of(case)
    for count in (1, TOKENS - position):
        caches = made.make_cache()
        mx.eval(made(mx.array([prompt[: position + 5]]), cache=caches), [layer.state for layer in caches])
        assert [layer.trim(5) for layer in caches] == [5] * len(caches)
        logits = made(mx.array([prompt[position : position + count]]), cache=caches)[0]
        assert_equals_reference(case, logits, slice(position, position + count))


@each_case
def test_single_steps_match_reference(case: str) -> None:
    assert_equals_reference(case, compute_in_chunks(build_model(case), tokens_of(case), 1))


@each_case
def test_query_blocks_match_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glm_moe_dsa, "BLOCK_BYTES", 40_000)
    assert_equals_reference(case, build_model(case)(mx.array([tokens_of(case)]))[0])


@each_case
@pytest.mark.parametrize("gathered_from", [1, 1000], ids=["gathered", "masked"])
def test_gathered_and_masked_attention_match_reference(
    case: str, gathered_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glm_moe_dsa, "GATHERED_FROM", gathered_from)
    assert_equals_reference(case, compute_in_chunks(build_model(case), tokens_of(case), 20))


@each_case
def test_padded_batch_matches_reference(case: str) -> None:
    made, prompt, lengths = build_model(case), tokens_of(case), (TOPK - 4, 3 * TOPK + 2)
    held = []
    for length in lengths:
        held.append(made.make_cache())
        mx.eval(made(mx.array([prompt[:length]]), cache=held[-1]), [layer.state for layer in held[-1]])
    caches = [CacheList.merge(list(layers)) for layers in zip(*held, strict=True)]
    for step in range(TOPK):  # over the place where the shorter one has more rows than are selected
        at = [length + step for length in lengths]
        logits = made(mx.array([[prompt[n]] for n in at]), cache=caches)[:, 0]
        assert_equals_reference(case, logits, at)
