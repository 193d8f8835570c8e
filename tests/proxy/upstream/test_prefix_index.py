"""Token sequences found by their place in the order: as a look at each finds them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from warmline_common.protocol.tokens import count_common_tokens, pack_tokens
from warmline_proxy.upstream.prefix_index import PrefixIndex

# Few tokens, so that prefixes are shared; their bytes differ in every place of a token.
TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 65_536, 1 << 24]), max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS.filter(bool), max_size=12), TOKENS, st.sets(st.integers(0, 11)))
def test_lookups_find_what_a_look_at_each_finds(sequences: list[list[int]], ids: list[int], removed: set[int]) -> None:
    index, prompt = PrefixIndex(), pack_tokens(ids)
    packed = {str(number): pack_tokens(each) for number, each in enumerate(sequences)}
    for number, (name, tokens) in enumerate(packed.items()):
        index.add(tokens, number, name)
    for number in removed:
        index.remove(packed.pop(str(number), b"none"), number, str(number))
    assert len(index) == len(packed)

    nearest = list(index.iterate_nearest(prompt))
    common = {name: count_common_tokens(tokens, prompt) for name, tokens in packed.items()}
    assert sorted(nearest) == sorted((count, name) for name, count in common.items() if count)
    assert [count for count, _ in nearest] == sorted((count for count, _ in nearest), reverse=True)

    prefixes = list(index.iterate_prefixes(prompt))
    begun = [(len(tokens) // 4, name) for name, tokens in packed.items() if prompt.startswith(tokens)]
    assert prefixes == sorted(begun, key=lambda item: (-item[0], int(item[1]))), "the longest, then the oldest first"
