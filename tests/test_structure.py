"""Limits of the code's structure: sizes of folders, modules, functions and constructors, docstrings, class names."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("proxy", "backend", "cachectl", "launchd")
MODULES_MAX = 10  # in a folder, without __init__
MODULE_LINES_MAX = 450
FUNCTION_LINES_MAX = 60
CONSTRUCTOR_ARGUMENTS_MAX = 8
QUESTION_WORDS = ("What", "Who", "Whose", "Whether", "Where", "How", "Which", "When")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def trees(*folders: str) -> dict[Path, ast.Module]:
    paths = (path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path: parse(path) for path in paths}


@cache
def list_definitions(path: Path) -> list[Function | ast.ClassDef]:
    """List functions and classes, nested ones too; only statements are searched, since expressions contain none."""
    found, statements = list[Function | ast.ClassDef](), list[ast.AST](parse(path).body)
    while statements:
        node = statements.pop()
        if isinstance(node, Function | ast.ClassDef):
            found.append(node)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, block, ())
    return found


def iter_definitions(*folders: str) -> Iterator[tuple[Path, Function | ast.ClassDef]]:
    for path in trees(*folders):
        for node in list_definitions(path):
            yield path, node


def test_folders_have_at_most_10_modules() -> None:
    counts = Counter(str(path.parent) for path in trees(*PRODUCT, "tests", "benchmarks") if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MODULES_MAX} == {}


def test_modules_have_at_most_450_lines() -> None:
    lengths = {str(path): (ROOT / path).read_text().count("\n") for path in trees(*PRODUCT, "tests", "benchmarks")}
    assert {path: length for path, length in lengths.items() if length > MODULE_LINES_MAX} == {}


def test_functions_have_at_most_60_lines() -> None:
    assert [
        f"{path}: {node.name}"
        for path, node in iter_definitions(*PRODUCT, "tests", "benchmarks")
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ] == []


def test_constructors_have_at_most_8_arguments() -> None:
    assert [
        f"{path}: {node.name}"
        for path, node in iter_definitions(*PRODUCT)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if len(method.args.args) - 1 + len(method.args.kwonlyargs) > CONSTRUCTOR_ARGUMENTS_MAX
    ] == []


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path, node in iter_definitions(*PRODUCT):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_docstrings_begin_with_no_question_word() -> None:
    nodes = [*iter_definitions(*PRODUCT, "tests"), *trees(*PRODUCT, "tests").items()]
    assert [
        f"{path}: {getattr(node, 'name', '')}: {docstring[:60]}"
        for path, node in nodes
        if (docstring := ast.get_docstring(node, clean=False)) and docstring.split()[0] in QUESTION_WORDS
    ] == []


def test_folders_of_packages_say_their_purpose() -> None:
    packages = {path: tree for path, tree in trees(*PRODUCT).items() if path.name == "__init__.py"}
    assert [str(path) for path, tree in packages.items() if not ast.get_docstring(tree)] == []
