"""Messages of our programs about problems, read from their source.

A message is an argument of an exception of ours, of a function that makes or raises one, of a log call from warning
on, or of a function that prints to a terminal.  Values in it are `…`.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDERS = ("backend", "proxy", "cachectl", "launchd")
LOGGED = {"warning", "error", "critical", "exception", "log"}
PRINTERS = {
    "write_line",
    "_refuse_start",
    "print_message",
    "print_line",
    "run_checked",
    "_run_systemctl",
    "Ending",
    "finish_sequence",
    "encode_error_body",
    "_error",
    "_log_failures",
}
PRINTERS |= {"Outcome", "ProxyReadiness", "close", "print", "_add_finding", "_reject_file"}
VALUE = "…"
WORDS_MIN = 1  # of less, nothing could be found on a page
DEPTH_MAX = 3  # of names and functions that are followed to a text
VARIANTS_MAX = 5  # of a part of a message; what has more is a value
_PERCENT = re.compile(r"%[-\d.]*[sdrgf]")
_WORD = re.compile(r"[A-Za-z][a-z']+")


@dataclass(frozen=True, order=True)
class PrintedMessage:
    module: str  # its path in the repository
    carrier: str  # what it is given to: an exception's class, or a function
    text: str

    def __str__(self) -> str:
        return f"{self.module}: {self.carrier}: {self.text}"


def split_words(text: str) -> list[str]:
    return _WORD.findall(text.replace(VALUE, " "))


def find_messages(root: Path) -> list[PrintedMessage]:
    """All that are in the source under `root`, each once."""
    modules = [
        SourceModule(path, root) for folder in FOLDERS for path in sorted((root / folder).glob("warmline_*/**/*.py"))
    ]
    failures = _list_error_names(modules)
    makers = {each.name for module in modules for each in module.functions if _is_error_maker(each, failures)}
    elsewhere = _list_returned(modules)
    constants = {
        f"{Path(module.name).stem}.{name}": values for module in modules for name, values in module.constants.items()
    }
    found = {message for module in modules for message in module.find_messages(failures | makers, elsewhere, constants)}
    return sorted(message for message in found if len(split_words(message.text)) >= WORDS_MIN)


class SourceModule:
    def __init__(self, path: Path, root: Path) -> None:
        self.name = str(path.relative_to(root))
        self.tree = ast.parse(path.read_text())

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def returned(self) -> dict[str, list[ast.expr]]:
        """Values that each function may return."""
        return {
            function.name: [
                node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None
            ]
            for function in self.functions
        }

    @cached_property
    def constants(self) -> dict[str, list[ast.expr]]:
        """Constants assigned at the module's top."""
        return _list_assigned(self.tree)

    def find_messages(
        self,
        carriers: set[str],
        elsewhere: Mapping[str, list[ast.expr]],
        constants: Mapping[str, list[ast.expr]],
    ) -> Iterator[PrintedMessage]:
        """Find the module's messages; `elsewhere`: values that other modules' functions return; `constants`: theirs."""
        self._known = {**elsewhere, **self.returned}
        imported = {
            alias.asname or alias.name: constants[f"{(each.module or '').rpartition('.')[2]}.{alias.name}"]
            for each in ast.walk(self.tree)
            if isinstance(each, ast.ImportFrom)
            for alias in each.names
            if f"{(each.module or '').rpartition('.')[2]}.{alias.name}" in constants
        }
        yield from self._find_in_node(self.tree, carriers, imported)

    def _find_in_node(
        self, node: ast.AST, carriers: set[str], names: Mapping[str, list[ast.expr]]
    ) -> Iterator[PrintedMessage]:
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            names = {**names, **_list_assigned(node)}
        if isinstance(node, ast.Call) and (carrier := self._find_carrier(node, carriers)):
            for text in self._list_printed(node, carrier, names):
                yield PrintedMessage(self.name, carrier, " ".join(_PERCENT.sub(VALUE, text).split()))
        for child in ast.iter_child_nodes(node):
            yield from self._find_in_node(child, carriers, names)

    def _list_printed(self, call: ast.Call, carrier: str, names: Mapping[str, list[ast.expr]]) -> list[str]:
        if carrier == "FieldError" and len(call.args) > 1:  # the field in quotes, and the fault
            field, fault = (self._list_texts(given, names) or [VALUE] for given in call.args[:2])
            return _join_variants([["'"], field, ["' "], fault])
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        return [text for each in given for text in self._list_texts(each, names)]

    def _find_carrier(self, call: ast.Call, carriers: set[str]) -> str:
        """ "" for a call that tells people nothing."""
        name = _get_callee_name(call)
        if isinstance(call.func, ast.Attribute) and _get_name(call.func.value) == "log":
            return name if name in LOGGED else ""
        if name == "__init__" and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
            return self._find_enclosing_error(call, carriers)
        if name == "print" and not any(keyword.arg == "file" for keyword in call.keywords):
            return ""  # a result
        return name if name in carriers or name in PRINTERS or name.endswith(("Error", "Exception")) else ""

    def _find_enclosing_error(self, call: ast.Call, carriers: set[str]) -> str:
        around = (each for each in self.classes if each.lineno <= call.lineno <= (each.end_lineno or 0))
        return next((each.name for each in around if each.name in carriers), "")

    def _list_texts(self, node: ast.expr, names: Mapping[str, list[ast.expr]], depth: int = 0) -> list[str]:
        """List possible texts of an expression; names and functions of the module are followed."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return _join_variants([self._list_part_texts(part, names, depth) for part in parts])
            case ast.IfExp(body=body, orelse=orelse):
                return [*self._list_texts(body, names, depth), *self._list_texts(orelse, names, depth)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self._list_texts(value, names, depth)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _join_variants([self._list_texts(side, names, depth) or [VALUE] for side in (left, right)])
            case ast.Name(id=name) if depth < DEPTH_MAX:
                return [text for value in names.get(name, []) for text in self._list_texts(value, names, depth + 1)]
            case ast.Call(func=ast.Name(id="add_home"), args=[text, *_]):  # which returns it with another command
                return self._list_texts(text, names, depth)
            case ast.Call() if depth < DEPTH_MAX:
                returned = self._known.get(_get_dotted_name(node.func)) or self._known.get(_get_callee_name(node), [])
                return [text for value in returned for text in self._list_texts(value, names, depth + 1)]
        return []

    def _list_part_texts(self, part: ast.expr, names: Mapping[str, list[ast.expr]], depth: int) -> list[str]:
        match part:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.FormattedValue(value=ast.IfExp() | ast.Call() as value):
                texts = self._list_texts(value, names, depth)
                return texts if 0 < len(texts) <= VARIANTS_MAX else [VALUE]
        return [VALUE]


def _join_variants(parts: list[list[str]]) -> list[str]:
    whole = [""]
    for part in parts:
        whole = [before + after for before in whole for after in part]
    return whole


def _list_assigned(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[ast.expr]]:
    """List the values assigned to each name anywhere in a function, or at the top of a module."""
    inside = ast.iter_child_nodes(node) if isinstance(node, ast.Module) else ast.walk(node)
    found: dict[str, list[ast.expr]] = {}
    for each in inside:
        match each:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ):
                found.setdefault(name, []).append(value)
    return found


def _list_returned(modules: list[SourceModule]) -> dict[str, list[ast.expr]]:
    """List values returned by functions: by module and name, and by unique names."""
    counts = Counter(name for module in modules for name in module.returned)
    found: dict[str, list[ast.expr]] = {}
    for module in modules:
        for name, values in module.returned.items():
            found[f"{Path(module.name).stem}.{name}"] = values
            if counts[name] == 1:
                found[name] = values
    return found


def _list_error_names(modules: list[SourceModule]) -> set[str]:
    """List the names of our exceptions' classes."""
    bases = {each.name: {_get_name(base) for base in each.bases} for module in modules for each in module.classes}
    known = {"Exception", "ValueError", "LookupError", "RuntimeError", "OSError"}
    while more := {name for name, own in bases.items() if own & known} - known:
        known |= more
    return known


def _is_error_maker(function: ast.FunctionDef | ast.AsyncFunctionDef, failures: set[str]) -> bool:
    """True if a function returns an exception, or raises one whenever it is called."""
    return function.returns is not None and bool(
        {node.id for node in ast.walk(function.returns) if isinstance(node, ast.Name)} & {*failures, "NoReturn"}
    )


def _get_callee_name(call: ast.Call) -> str:
    return _get_name(call.func)


def _get_dotted_name(node: ast.expr) -> str:
    return f"{_get_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else _get_name(node)


def _get_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
