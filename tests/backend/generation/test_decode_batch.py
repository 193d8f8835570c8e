"""Decode batches: the tokens that they append to, and those that processors are given."""

from pathlib import Path

import pytest

from support.backend.families import load_family
from warmline_backend.generation.decode_batch import DecodeBatch
from warmline_backend.generation.sequence import GenerationRequest, Sequence, make_decode_batch
from warmline_backend.model.model import ServedModel
from warmline_backend.request.params import GenerationParams
from warmline_common.protocol.tokens import TokenArray

PROMPT = TokenArray(range(1, 40))


def make_batch(served: ServedModel, last_token: int) -> DecodeBatch:
    """Batch of one prompt that ends with this token."""
    prompt, params = TokenArray([*PROMPT[:-1], last_token]), GenerationParams(max_tokens=8, ignore_eos=True)
    sequence = Sequence(GenerationRequest("a", prompt, params, lambda _: None), served.make_kv(journals=False), served)
    sequence.prefill_chunk(512)
    return make_decode_batch([sequence])


def take_tokens(batch: DecodeBatch, steps: int) -> list[list[int]]:
    return [[response.token for response in batch.next()] for _ in range(steps)]


def test_read_tokens_are_those_of_a_step(root: Path) -> None:
    served = load_family("llama", root)
    expected = take_tokens(make_batch(served, 7), 4)
    batch = make_batch(served, 7)
    rows = batch.prompt_cache[0].offset.item()
    assert batch.can_read_sampled and batch.read_sampled()[0] == expected[0]
    assert batch.prompt_cache[0].offset.item() == rows, "no step has begun"
    assert batch.is_read and not batch.can_read_sampled
    assert take_tokens(batch, 2) == expected[1:3]
    assert batch.read_sampled()[0] == expected[3]


@pytest.mark.parametrize("reads", [(False, False), (True, True), (True, False), (False, True)])
def test_batches_merge_whether_read_or_not(root: Path, reads: tuple[bool, bool]) -> None:
    served = load_family("llama", root)
    expected = [take_tokens(make_batch(served, last_token), 4) for last_token in (7, 8)]
    host, newcomer = make_batch(served, 7), make_batch(served, 8)
    assert take_tokens(host, 1) == expected[0][:1]
    for batch, is_read, tokens in zip((host, newcomer), reads, (expected[0][1], expected[1][0]), strict=True):
        assert not is_read or batch.read_sampled()[0] == tokens
    host.extend(newcomer)
    first = 1 + reads[0], 0 + reads[1]
    for n, step in enumerate(take_tokens(host, 2)):
        assert step == [expected[0][first[0] + n][0], expected[1][first[1] + n][0]]


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
