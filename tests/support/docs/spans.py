"""Code spans of the documentation, and their existence in the project.  Pure."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from typer.core import TyperCommand, TyperGroup

Program = TyperCommand | TyperGroup

_BLOCKS = re.compile(r"^```.*?^```$|^    .*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_PATH = re.compile(r"(?:docs|benchmarks|tests|launchd|proxy|backend|cachectl|requirements|\.ci)/[\w./-]*\w")


def list_spans(text: str) -> list[str]:
    """List the code spans of prose and tables; two-line spans are joined, a table's `\\|` is a bar."""
    prose = _BLOCKS.sub("", text)
    return [re.sub(r"\s+", " ", found[1]).replace("\\|", "|") for found in _SPAN.finditer(prose)]


def find_problem(span: str, programs: Mapping[str, Program]) -> str:
    """Find why this can't be typed; "" if it can, or is no command of ours.

    Arguments are not judged: they stand for the reader's.  What is in [brackets] may be left out, `a|b` is either.
    """
    words = _split_words(span)
    program = words[0].removeprefix(".venv/bin/") if words else ""
    if program not in programs or len(words) == 1:
        return ""
    command, rest = programs[program], words[1:]
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        verbs = rest[0].split("|")
        if unknown := [verb for verb in verbs if verb not in command.commands]:
            return f"{program} has no {unknown[0]!r}"
        command, rest = command.commands[verbs[0]], rest[1:]
    flags = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = [word.partition("=")[0] for words in rest for word in words.split("|") if re.match(r"--?[a-z]", word)]
    unknown = [flag for flag in used if flag not in {*flags, "--help"}]
    return f"{span!r}: there is no {unknown[0]}" if unknown else ""


def _split_words(span: str) -> list[str]:
    try:
        return shlex.split(re.sub(r"[\[\]]", "", span))
    except ValueError:  # a span of something else, with a lone quote
        return span.split()


def list_paths(span: str) -> list[str]:
    """List the files and folders of the checkout that a span names, by whole path, or with `*` for several."""
    return [span] if _PATH.fullmatch(span.rstrip("/")) or (_PATH.match(span) and "*" in span) else []


def is_missing(path: str, root: Path) -> bool:
    return not list(root.glob(path))


def list_variables(text: str) -> set[str]:
    return set(re.findall(r"\bWARMLINE_[A-Z_]+[A-Z]\b", text))


def list_make_targets(text: str) -> set[str]:
    """List the targets of `make` in spans."""
    commands = [_split_words(span) for span in list_spans(text) if span.startswith("make ")]
    return {word for words in commands for word in words[1:] if "=" not in word}
