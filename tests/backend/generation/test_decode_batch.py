"""Decode batches: the tokens that they append to, and those that processors are given."""

from pathlib import Path

import pytest

from support.backend.families import load_family
from warmline_backend.generation.sequence import GenerationRequest, Sequence, make_decode_batch
from warmline_backend.request.params import GenerationParams
from warmline_common.protocol.tokens import TokenArray

PROMPT = TokenArray(range(1, 40))


@pytest.mark.parametrize(("penalty", "context_length"), [(1.0, 0), (1.1, len(PROMPT) + 2)])
def test_context_is_kept_for_processors_alone(root: Path, penalty: float, context_length: int) -> None:
    served = load_family("llama", root)
    params = GenerationParams(max_tokens=8, ignore_eos=True, repetition_penalty=penalty)
    sequence = Sequence(GenerationRequest("a", PROMPT, params, lambda _: None), served.make_kv(journals=False), served)
    sequence.prefill_chunk(512)
    batch = make_decode_batch([sequence])
    sampled = [response.token for _ in range(2) for response in batch.next()]
    assert sequence.kv.tokens == PROMPT + sampled[:2]
    assert sequence.kv.tokens is not PROMPT and len(PROMPT) == 39
    (context,) = batch._token_context
    assert context.tokens.tolist() == [] if not context_length else [*PROMPT, *sampled]
