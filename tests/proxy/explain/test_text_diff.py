"""Differences of two texts, as marked ranges."""

from warmline_proxy.explain.text_diff import diff_texts

MARKED_TEXTS = [
    ("It is 14:22:33 now.", "It is 14:25:01 now.", (["22", "33"], ["25", "01"])),
    ("the same", "the same", ([], [])),
    ("list the files in a", "list all the files in a", ([], ["all "])),
    ("list the files, and more", "list all files", (["the"], ["all"])),  # one window ends there
    ("It was an engineer, not a pilot.", "It was an engine, not a pilot.", (["engineer"], ["engine"])),
    ("say: alpha beta gamma", "say: one, two! three?", (["alpha beta gamma"], ["one, two! three?"])),
    ("a\n------\nb", "a\n----\nb", (["------"], ["----"])),
    ("", "anything", ([], ["anything"])),
    ("", "", ([], [])),
]


def test_differing_words_are_marked() -> None:
    for old, new, marked in MARKED_TEXTS:
        ranges = diff_texts(old, new)
        words = tuple([text[a:b] for a, b in each] for text, each in zip((old, new), ranges, strict=True))
        assert words == marked, new


def test_long_repetitive_texts_are_compared_fast() -> None:
    """Compared word by word they would take minutes."""
    old, new = "x" + "a," * 3000, "y" + "b," * 3000
    assert diff_texts(old, new) == ([(0, len(old))], [(0, len(new))])
