"""Documentation of settings and gates against the code, and its links."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from warmline_common.settings.models import KEYS, OWN_SETTINGS, parse_models
from warmline_common.settings.table import SETTINGS
from warmline_run.settings.reference import BEGIN, END, replace_table
from warmline_run.smoke.runner import CHECKS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_settings_table_is_generated() -> None:
    """`make reference` writes it anew."""
    text = read_document("settings.md")
    assert replace_table(text) == text
    made = text[text.index(BEGIN) : text.index(END)]
    assert re.findall(r"^\| `(\w+)` \|", made, flags=re.MULTILINE) == list(SETTINGS)


def test_keys_of_model_tables_are_documented() -> None:
    section = read_document("settings.md").partition("## Several models")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert named + [name for name in re.findall(r"`(\w+)`", section) if name in OWN_SETTINGS] == [
        *("path", "name", "aliases", "pinned", "idle_s"),
        *OWN_SETTINGS,
    ]
    assert set(KEYS) == {*named, *OWN_SETTINGS}
    (example,) = re.findall(r"```toml\n(.*?)```", section, flags=re.DOTALL)
    assert [model.name for model in parse_models(json.dumps(tomllib.loads(example)["models"]))] == [
        "large",
        "Qwen3-8B-4bit",
    ]


def test_reference_refuses_document_without_marks() -> None:
    with pytest.raises(ValueError, match=r"the marks .* are missing"):
        replace_table("# Settings")


def test_gates_doc_lists_checks_in_order() -> None:
    named = re.findall(r"^\| `([a-z][\w-]*)` \|", read_document("gates.md"), flags=re.MULTILINE)
    assert named == [gate.name for gate in CHECKS]


def read_document(document: str) -> str:
    return (ROOT / "docs" / document).read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        led_to = document.parent / path if path else document
        assert led_to.is_file(), target
        assert not heading or heading in list_anchors(led_to), target


def list_anchors(document: Path) -> set[str]:
    """List the headings as links name them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
