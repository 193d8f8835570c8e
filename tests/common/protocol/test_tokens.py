"""Chain hashes name a block and all before it; packed tokens compare like lists."""

from itertools import takewhile

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from warmline_common.protocol.tokens import (
    BLOCK_TOKENS,
    PrefixHash,
    TokenArray,
    chain_hashes,
    count_common_chars,
    count_common_tokens,
    namespace,
    pack_tokens,
    prefix_digest,
    prefix_digests,
    unpack_tokens,
)

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=300)
ROOT = namespace("f")


@given(IDS)
def test_packing_is_reversible_u32le(ids: list[int]) -> None:
    packed = pack_tokens(ids)
    assert packed == b"".join(i.to_bytes(4, "little") for i in ids)
    assert unpack_tokens(packed) == ids


@given(IDS, IDS, st.integers(-310, 310), st.integers(-310, 310))
def test_token_array_is_as_a_list(ids: list[int], more: list[int], start: int, end: int) -> None:
    tokens = TokenArray(ids)
    assert tokens == ids and ids == tokens and tokens == tuple(ids) and list(tokens) == tokens.tolist() == ids
    assert tokens[start:end] == ids[start:end] and len(tokens) == len(ids) and bool(tokens) == bool(ids)
    assert (tokens == TokenArray(more)) == (tokens == more) == (ids == more)
    part = tokens[:]
    for token in more:
        part.append(token)
    copied = TokenArray(tokens)
    copied += TokenArray(more)
    assert part == copied == tokens + more == tokens + TokenArray(more) == ids + more
    assert tokens == ids, "slices, sums and copies are apart"
    assert pack_tokens(tokens) == pack_tokens(ids) and TokenArray.from_bytes(pack_tokens(ids)) == tokens
    if ids:
        assert tokens[-1] == ids[-1] and tokens[0] == ids[0]


def test_token_array_refuses_other_ids() -> None:
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            TokenArray([wrong])
    assert TokenArray([1]) != [1, 2] and TokenArray([1]) != "1"
    with pytest.raises(TypeError):
        hash(TokenArray())


def test_truncated_token_raises_value_error() -> None:
    with pytest.raises(ValueError):
        unpack_tokens(b"\0\0\0\0\0")


@given(st.integers(0, 4), st.integers(0, BLOCK_TOKENS - 1), st.integers(0, 2**32 - 1))
def test_only_full_blocks_have_hashes(blocks: int, rest: int, token: int) -> None:
    assert len(chain_hashes(ROOT, pack_tokens([token] * (blocks * BLOCK_TOKENS + rest)))) == blocks


@given(st.integers(0, 4 * BLOCK_TOKENS - 1))
def test_changed_token_changes_own_and_later_hashes(position: int) -> None:
    ids = list(range(4 * BLOCK_TOKENS))
    changed = [*ids[:position], 10**6, *ids[position + 1 :]]
    same = [
        a == b
        for a, b in zip(chain_hashes(ROOT, pack_tokens(ids)), chain_hashes(ROOT, pack_tokens(changed)), strict=True)
    ]
    assert same == [block < position // BLOCK_TOKENS for block in range(4)]


def test_prefix_digest_covers_root_and_all_tokens() -> None:
    tokens = pack_tokens(range(10))
    digests = prefix_digests(b"root", tokens, [7, 0, 7, 10])
    assert digests == {at: prefix_digest(b"root", tokens[: 4 * at]) for at in (0, 7, 10)}
    others = [prefix_digest(b"roof", tokens), prefix_digest(b"root", pack_tokens([9, *range(1, 10)]))]
    assert len({*digests.values(), *others}) == 5


@given(st.lists(IDS, max_size=5))
def test_prefix_hash_extends_incrementally(parts: list[list[int]]) -> None:
    prefix, hashes, tokens = PrefixHash(ROOT), [], b""
    for part in parts:
        before, digest = prefix, prefix.digest
        prefix, more = prefix.extend_with_hashes(pack_tokens(part))
        assert before.digest == digest
        hashes += more
        tokens += pack_tokens(part)
        assert prefix.digest == prefix_digest(ROOT, tokens)
        assert prefix.tokens_digest == xxhash.xxh3_128_digest(tokens)
        assert (prefix.length, hashes) == (len(tokens) // 4, chain_hashes(ROOT, tokens))


def test_namespaces_differ_by_model_and_tenant() -> None:
    roots = {namespace("f"), namespace("g"), namespace("f", "a"), namespace("fa")}
    assert len(roots) == 4 and all(len(root) == 16 for root in roots)
    tokens = pack_tokens(range(BLOCK_TOKENS))
    assert len({chain_hashes(root, tokens)[0] for root in roots}) == 4


@given(IDS, IDS, IDS)
def test_count_common_tokens_counts_whole_tokens(shared: list[int], a: list[int], b: list[int]) -> None:
    one, other = shared + a, shared + b
    expected = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    assert count_common_tokens(pack_tokens(one), pack_tokens(other)) == expected


@given(st.text(), st.text(), st.text())
def test_count_common_chars(shared: str, a: str, b: str) -> None:
    one, other = shared + a, shared + b
    expected = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    assert count_common_chars(one, other) == expected
