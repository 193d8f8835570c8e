"""The settings as a Markdown table, which stands between two marks of docs/settings.md.  Pure.

`python -m warmline_run.settings.reference DOCUMENT` prints the document with today's table (`make reference`).
"""

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
        return "`~/.warmline`"  # not the folder of the user who made the table
    shown = str(setting.default).lower() if setting.is_switch else f"{setting.default}"
    return f"`{shown.removesuffix('.0')}`"


def replace_table(text: str) -> str:
    """The document with today's table.  Raises ValueError where it lacks the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the marks {BEGIN} and {END} are missing")
    return f"{before}{begin}\n{render_table()}\n{end}{after}"


if __name__ == "__main__":
    sys.stdout.write(replace_table(Path(sys.argv[1]).read_text(encoding="utf-8")))
