"""The settings as a Markdown table: what docs/settings.md has between its two marks.  Pure.

`python -m warmline_run.settings.reference DOCUMENT` prints the document with the table of today (`make reference`).
"""

import re
import sys
from pathlib import Path

from warmline_common.settings.table import SETTINGS, Setting

BEGIN, END = "<!-- made by `make reference` -->", "<!-- end of what is made -->"


def render_table() -> str:
    rows = [f"| `{each.name}` | {_format_default(each)} | {each.help} |" for each in SETTINGS.values()]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def _format_default(setting: Setting) -> str:
    if setting.default == "":
        return setting.unset_label
    if setting.name == "home":
        return "`~/.warmline`"  # whoever's home this was made in
    shown = str(setting.default).lower() if isinstance(setting.default, bool) else f"{setting.default}"
    return f"`{shown.removesuffix('.0')}`"


def replace_table(text: str) -> str:
    """The document with the table of today.  Raises ValueError where it lacks the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the marks {BEGIN} and {END} are missing")
    return f"{before}{begin}\n{render_table()}\n{end}{after}"


def strip_backticks(help_text: str) -> str:
    """A help line for a terminal."""
    return re.sub(r"`([^`]*)`", r"\1", help_text)


if __name__ == "__main__":
    sys.stdout.write(replace_table(Path(sys.argv[1]).read_text(encoding="utf-8")))
