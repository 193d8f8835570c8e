"""Crash points: SIGKILL at every step that changes a home; the next start finds all stored data intact."""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POINTS = Path(__file__).parents[1] / "support" / "crash" / "points.py"
PACKAGES = Path(__file__).parents[2]
SEAM = PACKAGES / "backend" / "warmline_common" / "storage" / "disk.py"

# Changes of a home must go through the seam.  Exempt: `demo`, which makes a model's folder, whose files are written by
# mlx, tokenizers and pip and are not part of the store; `file_lock`, whose file is empty; service files, outside the
# home.
EXEMPT = ("/demo.py", "/demo_package.py", "/file_lock.py", "/services/manager.py", "/services/actions.py")
OF_PATHS = {"rename", "unlink", "rmdir", "mkdir", "hardlink_to", "symlink_to", "write_text", "write_bytes", "touch"}
OF_PATHS |= {"chmod"}
OF_MODULES = {
    "os": OF_PATHS
    | {"fsync", "fdatasync", "replace", "remove", "removedirs", "renames", "link", "makedirs", "truncate"},
    "fcntl": {"fcntl"},
    "shutil": {"rmtree", "move", "copy", "copy2", "copyfile", "copytree"},
    "Path": {"replace"},
}
WRITING = set("wax+")

# Reads of a home must go through `disk.read_file` and `disk.open_to_read`, which neither wait at a FIFO nor read
# without end.  By module, the functions that open something else, or make the same checks.
PLAIN_READS = {
    # a model's folder
    "backend/warmline_backend/doctor/files.py": {"_find_snapshot", "_read_json_object", "read_shard"},
    "backend/warmline_backend/model/fingerprint.py": {"_compute", "_hash_sources", "compute_fingerprint", "has"},
    "backend/warmline_backend/import_structure.py": {"define_cached"},  # beside transformers' own bytecode
    "backend/warmline_common/logging.py": {"_open", "_open_private"},  # to write
    "backend/warmline_common/process/exit_codes.py": {"discard_output", "open_closed_streams"},  # /dev/null
    "backend/warmline_common/process/pids.py": {"read_command_line"},  # /proc
    "backend/warmline_common/storage/regular_file.py": {"open_regular"},
    "cachectl/warmline_cachectl/client.py": {"_send_request"},  # a URL
    "launchd/warmline_run/services/manager.py": {"read_installed"},  # the service manager's own folder
    "launchd/warmline_run/settings/reference.py": {"<module>"},  # a page of the documents
    "proxy/warmline_proxy/archive/reader.py": {"open_archive"},  # the same checks, with an archive's own words
    "proxy/warmline_proxy/dashboard/pages.py": {"__init__"},  # the package's own
}


def run_scenario(scenario: str, *flags: str) -> Any:
    in_memory = Path("/dev/shm")  # where available: a killed process loses nothing that a disk would keep
    with tempfile.TemporaryDirectory(dir=in_memory if os.access(in_memory, os.W_OK) else None) as folder:
        done = subprocess.run(
            [sys.executable, POINTS, folder, scenario, *flags], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kill_at_every_storing_step_loses_nothing() -> None:
    record = run_scenario("storing")
    assert not record["wrong"], "\n".join(record["wrong"])
    assert len(record["steps"]) > 250 and record["points"] > 200
    after = {operation: stored for operation, (_, stored) in record["stored"].items()}
    assert after["first save"]["talk"] == 400
    assert after["second save"]["again"] == 550
    assert after["branch"]["branch"] == 340
    assert after["merge"]["longer"] == 240
    assert (after["eviction for save"]["again"], after["eviction for save"]["new"]) == (400, 260)
    assert after["quarantine"]["branch"] == 220
    responses = [after[name]["responses"] for name in ("stored responses", "deleted response", "purge conversation")]
    assert responses == [2, 1, 0]
    assert after["purge conversation"]["longer"] == 0
    assert after["start after a kill"]["newer"] == 0


def test_kill_at_every_upkeep_step_is_atomic() -> None:
    record = run_scenario("upkeep")
    assert not record["wrong"], "\n".join(record["wrong"])
    assert record["points"] > 70
    after = {operation: stored for operation, (_, stored) in record["stored"].items()}
    assert (after["gc to pinned"]["talk"], after["gc to pinned"]["new"]) == (400, 0)
    assert after["import conversation"]["new"] == after["two saves"]["new"] == 260
    assert after["purge shared conversation"] == after["branch"] | {"talk": 220, "again": 220}


def test_planted_early_delete_is_detected() -> None:
    record = run_scenario("storing", "--only", "merge", "--fault")
    assert any("longer: 0 tokens are stored" in wrong for wrong in record["wrong"])


def list_modules() -> list[Path]:
    found = [path for package in PACKAGES.glob("*/warmline_*") for path in package.rglob("*.py")]
    assert len(found) > 240
    return [path for path in found if not str(path).endswith((SEAM.name, *EXEMPT))]


def describe_disk_change(call: ast.Call) -> str:
    """Call that changes the disk outside the seam; "" where there is none."""
    name = call.func
    if isinstance(name, ast.Name):
        return "open for writing" if name.id == "open" and _is_write_mode(call.args[1:2]) else ""
    if not isinstance(name, ast.Attribute):
        return ""
    owner = name.value.id if isinstance(name.value, ast.Name) else ""
    if owner == "disk":
        return ""
    if name.attr in OF_MODULES.get(owner, set()) or name.attr in OF_PATHS:
        return f"{owner}.{name.attr}"
    if name.attr == "replace" and len(call.args) == 1 and not call.keywords:
        return ".replace with one argument, as of a Path"
    return "open for writing" if name.attr == "open" and _is_write_mode(call.args[:1]) else ""


def _is_write_mode(mode: list[ast.expr]) -> bool:
    return any(isinstance(each, ast.Constant) and WRITING & set(str(each.value)) for each in mode)


def test_disk_changes_go_through_disk_module() -> None:
    steps = {each.name for each in ast.parse(SEAM.read_text()).body if isinstance(each, ast.FunctionDef)}
    problems = []
    for path in list_modules():
        name, nodes = path.relative_to(PACKAGES), list(ast.walk(ast.parse(path.read_text())))
        calls = [(node.lineno, describe_disk_change(node)) for node in nodes if isinstance(node, ast.Call)]
        problems += [f"{name}:{line}: {call}" for line, call in calls if call]
        imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        problems += [f"{name}: call it as disk.{step}, where tests step in" for step in sorted(imported & steps)]
    assert not problems, "\n".join(problems)


def is_plain_read(call: ast.Call) -> bool:
    """True for a call that opens or reads a file without the seam's checks."""
    name = call.func
    if isinstance(name, ast.Name):
        return name.id in ("open", "FileIO")
    if not isinstance(name, ast.Attribute) or (isinstance(name.value, ast.Name) and name.value.id == "lmdb"):
        return False
    return name.attr in ("read_text", "read_bytes", "open", "FileIO")


def iter_calls(node: ast.AST, function: str = "<module>") -> Iterator[tuple[str, ast.Call]]:
    """Calls below a node, each with the name of the function that it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from iter_calls(child, child.name if is_function else function)


def test_home_is_read_through_disk_module() -> None:
    found: dict[str, set[str]] = {}
    for path in PACKAGES.glob("*/warmline_*/**/*.py"):
        functions = {name for name, call in iter_calls(ast.parse(path.read_text())) if is_plain_read(call)}
        if functions and path != SEAM:
            found[str(path.relative_to(PACKAGES))] = functions
    assert found == PLAIN_READS
