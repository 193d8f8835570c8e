"""What the documentation says of settings and gates is what they are, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from warmline_run.gates.running import GATES
from warmline_run.settings import SETTINGS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
SAID_IN_WORDS = {
    "home": "`~/.warmline`",
    "served_name": "the model's own",
    "client_key": "none",
    "adapter_path": "none",
    "stabilize": "none",
    "cors_origins": "none",
    "allowed_hosts": "none",
}


def test_the_settings_table_is_complete_and_right() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \| .+ \|$", text_of("settings.md"), flags=re.MULTILINE))
    shown = {name: str(setting.default).lower().removesuffix(".0") for name, setting in SETTINGS.items()}
    assert told == {name: SAID_IN_WORDS.get(name, f"`{default}`") for name, default in shown.items()}


def test_the_gates_stand_there_in_their_order() -> None:
    named = re.findall(r"^\| `([a-z][\w-]*)` \|", text_of("gates.md"), flags=re.MULTILINE)
    assert named == [gate.name for gate in GATES]


def text_of(document: str) -> str:
    return (ROOT / "docs" / document).read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        led_to = document.parent / path if path else document
        assert led_to.is_file(), target
        assert not heading or heading in headings(led_to), target


def headings(document: Path) -> set[str]:
    """As links name them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
