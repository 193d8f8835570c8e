"""Comparison of all that users see with the golden files; `python surface.py --write` renews them."""

import pytest

import surface


@pytest.fixture(scope="module")
def found() -> dict[str, surface.Section]:
    return surface.collect_masked()


@pytest.mark.parametrize("section", surface.sections())
def test_section_matches_golden(found: dict[str, surface.Section], section: str) -> None:
    assert not surface.differences(surface.golden(section), found[section])


def test_every_section_has_a_golden_file(found: dict[str, surface.Section]) -> None:
    assert sorted(found) == surface.sections()
