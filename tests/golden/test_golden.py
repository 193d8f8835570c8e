"""Our GLM against the reference's logits, at all positions up to four times what the indexer selects."""

import mlx.core as mx
import numpy as np
import pytest
from golden_glm import golden, in_chunks, model
from recipe import CASES, TOKENS, TOPK
from recipe import tokens as tokens_of

from warmline_backend.models import glm_moe_dsa

# Float32's last bits: the reference's and ours add in another order.  Logits are about 2.
TOLERANCE = 5e-5

each_case = pytest.mark.parametrize("case", CASES)


def assert_as_reference(case: str, logits: mx.array) -> None:
    np.testing.assert_allclose(np.array(logits), golden(case, "logits"), rtol=0, atol=TOLERANCE)


def test_the_contexts_go_well_beyond_the_selection() -> None:
    assert TOKENS >= 4 * TOPK
    for case in CASES:
        assert golden(case, "logits").shape == (TOKENS, 64)
        assert golden(case, "tokens").tolist() == tokens_of(case)


@each_case
def test_layers_are_full_or_shared_as_in_the_reference(case: str) -> None:
    assert model(case).args.indexer_types == golden(case, "indexer_types").tolist()


@each_case
def test_in_one_go(case: str) -> None:
    assert_as_reference(case, model(case)(mx.array([tokens_of(case)]))[0])


@each_case
@pytest.mark.parametrize("size", [TOPK, 20, 64])
def test_in_chunks(case: str, size: int) -> None:
    assert_as_reference(case, in_chunks(model(case), tokens_of(case), size))


@each_case
def test_token_by_token(case: str) -> None:
    assert_as_reference(case, in_chunks(model(case), tokens_of(case), 1))


@each_case
@pytest.mark.parametrize("block_bytes", [1, 40_000], ids=["query by query", "a few queries"])
def test_in_blocks_of_queries(case: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glm_moe_dsa, "BLOCK_BYTES", block_bytes)
    assert_as_reference(case, model(case)(mx.array([tokens_of(case)]))[0])


@each_case
@pytest.mark.parametrize("gathered_from", [1, 1000], ids=["gathered", "masked"])
def test_either_way_of_attending_to_a_selection(case: str, gathered_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glm_moe_dsa, "GATHERED_FROM", gathered_from)
    assert_as_reference(case, in_chunks(model(case), tokens_of(case), 20))
