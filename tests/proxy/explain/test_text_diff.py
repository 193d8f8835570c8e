"""What differs in two texts, as people would mark it."""

import pytest

from warmline_proxy.explain.text_diff import diff_texts


@pytest.mark.parametrize(
    ("old", "new", "marked"),
    [
        ("It is 14:22:33 now.", "It is 14:25:01 now.", (["22", "33"], ["25", "01"])),
        ("the same", "the same", ([], [])),
        ("list the files in a", "list all the files in a", ([], ["all "])),
        ("list the files, and more", "list all files", (["the"], ["all"])),  # one window ends there
        ("It was an engineer, not a pilot.", "It was an engine, not a pilot.", (["engineer"], ["engine"])),
        ("say: alpha beta gamma", "say: one, two! three?", (["alpha beta gamma"], ["one, two! three?"])),
        ("a\n------\nb", "a\n----\nb", (["------"], ["----"])),
        ("", "anything", ([], ["anything"])),
        ("", "", ([], [])),
    ],
)
def test_words_that_differ_are_marked(old: str, new: str, marked: tuple[list[str], list[str]]) -> None:
    ranges = diff_texts(old, new)
    assert tuple([text[a:b] for a, b in each] for text, each in zip((old, new), ranges, strict=True)) == marked


def test_long_texts_that_say_the_same_again_and_again_are_marked_at_once() -> None:
    """Compared word by word they take minutes, and a prompt may well end in a table of zeros."""
    old, new = "x" + "a," * 3000, "y" + "b," * 3000
    assert diff_texts(old, new) == ([(0, len(old))], [(0, len(new))])
