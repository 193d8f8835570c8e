"""Settings of clients as docs/clients.md has them."""

import re
import textwrap

from support.docs.commands import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text()


def read_section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def list_files(title: str) -> list[str]:
    """Indented blocks of a section, without their indentation: files of the client, and transcripts."""
    return [
        textwrap.dedent(block)
        for block in re.findall(r"(?:^ {4}.*\n(?:\n(?= {4}))?)+", read_section(title), flags=re.MULTILINE)
    ]


def list_commands(title: str) -> list[str]:
    """Blocks of commands of a section."""
    return re.findall(r"^```sh\n(.*?)^```$", read_section(title), flags=re.MULTILINE | re.DOTALL)
