"""Parts that a text model can't read: lines in place of them, and refusals that clients recognise."""

import pytest

from warmline_common.protocol.media_parts import describe_refusal, find_placeholder, join_parts

IMAGE = find_placeholder("image_url")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], ""),
        (["a", "b"], "ab"),
        ([IMAGE], IMAGE),
        (["a", IMAGE, "b"], f"a\n{IMAGE}\nb"),
        (["a\n", IMAGE, "\tb"], f"a\n{IMAGE}\tb"),
        ([IMAGE, "", IMAGE], f"{IMAGE}\n{IMAGE}"),
        ([f"{IMAGE} is what it says", "b"], f"{IMAGE} is what it saysb"),
    ],
)
def test_placeholders_stand_on_lines_of_their_own(texts: list[str], expected: str) -> None:
    assert join_parts(texts) == expected
    assert join_parts(iter(texts)) == expected


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_refusal_of_image_has_phrases_that_agents_look_for(kind: str) -> None:
    text = describe_refusal(kind)
    assert f"{kind} is not supported" in text and f'"{kind}"' in text
    assert "does not support image input" in text and "Only 'text' content type is supported." in text


@pytest.mark.parametrize("kind", ["input_audio", "file", "a secret", None, ["image_url"], {}, 5])
def test_refusal_of_other_parts_quotes_what_may_be_a_text(kind: object) -> None:
    text = describe_refusal(kind)
    assert "image" not in text.replace(str(kind), "") and "Only 'text' content type is supported." in text
    assert text.count(str(kind)) == (2 if find_placeholder(kind) else 1)


def test_unknown_types_have_no_placeholder() -> None:
    assert [find_placeholder(kind) for kind in ("text", "", None, ["image_url"], 5)] == [""] * 5
