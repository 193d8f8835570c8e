"""Cache of tokenized texts: what is found, and its bounds."""

from array import array

from warmline_backend.prompt.tokenization.text_cache import (
    BLOCK_CHARS,
    TEXT_CHARS_MIN,
    TokenizedText,
    TokenizedTextCache,
    hash_beginnings,
)

HEAD = "".join(f"{number} " for number in range(BLOCK_CHARS))[: 3 * BLOCK_CHARS]


def make_text(text: str, root: bytes = b"") -> TokenizedText:
    return TokenizedText(text, array("I", [1]), array("I", [len(text)]), hash_beginnings(root, text))


def find(cache: TokenizedTextCache, text: str, root: bytes = b"") -> str:
    found = cache.find(hash_beginnings(root, text))
    return found.text if found else ""


def test_longest_beginning_is_found() -> None:
    cache = TokenizedTextCache()
    short, long = HEAD[: BLOCK_CHARS + 9] + "?", HEAD + "!"
    for text in (long, short):
        cache.add(make_text(text))
    assert find(cache, HEAD + " and more") == long
    assert find(cache, HEAD[: 2 * BLOCK_CHARS] + " and more") == long
    assert find(cache, HEAD[:BLOCK_CHARS] + " and more") == short, "the latest one that begins so"
    assert find(cache, short) == short
    assert find(cache, "x" + HEAD) == ""


def test_roots_are_apart() -> None:
    cache = TokenizedTextCache()
    cache.add(make_text(HEAD, b"one"))
    assert find(cache, HEAD, b"one") == HEAD
    assert find(cache, HEAD, b"two") == find(cache, HEAD) == ""


def test_short_text_has_no_hashes() -> None:
    assert hash_beginnings(b"", "x" * (TEXT_CHARS_MIN - 1)) == ()
    assert len(hash_beginnings(b"", "x" * TEXT_CHARS_MIN)) == 1
    assert TokenizedTextCache().find(()) is None


def test_oldest_texts_are_dropped_beyond_the_number() -> None:
    cache = TokenizedTextCache(texts_max=2)
    texts = [word * TEXT_CHARS_MIN for word in "abc"]
    cache.add(make_text(texts[0]))
    cache.add(make_text(texts[1]))
    assert find(cache, texts[0]), "used again"
    cache.add(make_text(texts[2]))
    assert [find(cache, text) for text in texts] == [texts[0], "", texts[2]]


def test_oldest_texts_are_dropped_beyond_the_bytes() -> None:
    texts = [make_text(word * BLOCK_CHARS) for word in "abcd"]
    cache = TokenizedTextCache(bytes_max=2 * texts[0].nbytes)
    for text in texts:
        cache.add(text)
        assert cache.nbytes == texts[0].nbytes * len(cache) <= 2 * texts[0].nbytes
    assert [bool(find(cache, text.text)) for text in texts] == [False, False, True, True]
    cache.add(make_text("e" * 3 * BLOCK_CHARS))
    assert len(cache) == cache.nbytes == 0, "one that is too large by itself is not kept"


def test_dropped_text_leaves_the_beginnings_of_others() -> None:
    cache = TokenizedTextCache()
    old, new = make_text(HEAD + "old"), make_text(HEAD + "new")
    cache.add(old)
    cache.add(new, replaced=old)
    assert len(cache) == 1 and cache.nbytes == new.nbytes
    assert find(cache, HEAD + "x") == new.text and find(cache, old.text) == new.text
    cache.add(new)
    assert len(cache) == 1 and cache.nbytes == new.nbytes
    cache.add(old)
    cache.add(make_text("z" * BLOCK_CHARS), replaced=old)
    assert find(cache, new.text) == new.text
    cache.clear()
    assert len(cache) == cache.nbytes == 0 and find(cache, new.text) == ""
