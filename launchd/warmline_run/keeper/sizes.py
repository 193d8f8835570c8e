"""Sizes of models, read by `warmline doctor`, one at a time, and remembered in HOME/models/sizes.json."""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from warmline_common.measurement.model_memory import ModelSize
from warmline_common.process.parent_watch import PARENT_PIPE
from warmline_common.process.version import version
from warmline_common.protocol.messages import convert
from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.settings.table import DEMO_MODEL, list_settings
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_run.processes import demo_arguments, doctor_command

log = logging.getLogger(__name__)

OUTPUT_CHARS_MAX = 2000  # of a report that failed
FAIL = "FAIL"
UNREADABLE = (ValueError, TypeError, KeyError, msgspec.ValidationError)  # of a report or an entry that is none


class ModelSizeError(Exception):
    """A model whose size can't be read: it can't be served.  The text says why, and what to do."""


@dataclass(frozen=True)
class SizeReport:
    """A model as it is on the disk.  `path`: the model's folder or name, the demo's prepared; `stamp`: of its files."""

    path: str
    stamp: str
    size: ModelSize
    machine_bytes: int  # that all models together may use


class SizeReader:
    """Reader of sizes.  One report process at a time: each imports mlx and builds the model without its weights."""

    def __init__(self, home: Home, environment: Mapping[str, str], pipe: int) -> None:
        self._file, self._environment, self._pipe = home.models / "sizes.json", environment, pipe
        self._turn = asyncio.Lock()

    async def read_size(self, config: ResolvedConfig) -> SizeReport:
        """Size of the configured model.  Raises ModelSizeError.  A cancel ends the report's process."""
        async with self._turn:
            path = await self._prepare_path(config)
            key, stamp = _format_key(config, path), _read_stamp(path, config)
            remembered = self._read_file().get(key)
            if (report := _parse_entry(path, remembered, stamp)) is None:
                report = await self._examine(config, path, stamp)
                self._remember(key, report)
            return report

    def is_current(self, config: ResolvedConfig, report: SizeReport) -> bool:
        """False where the model's files have changed since the report.  Reads their times alone."""
        return report.stamp == _read_stamp(report.path, config)

    async def _prepare_path(self, config: ResolvedConfig) -> str:
        if config["model"] != DEMO_MODEL:
            return str(config["model"])
        code, output, _ = await _run_process(demo_arguments(config), self._environment, self._pipe)
        if code:
            raise ModelSizeError("the demo model can't be prepared: see the message on the keeper's output")
        return output.strip()

    async def _examine(self, config: ResolvedConfig, path: str, stamp: str) -> SizeReport:
        command = doctor_command(config, path, ["--json"], self._environment)
        code, output, problem = await _run_process(command.arguments, command.environment, self._pipe)
        with suppress(*UNREADABLE):
            report = json.loads(output)
            if not report["memory"]:
                raise ModelSizeError(_describe_findings(report))
            if code:  # its backend decides, which is less strict, and says what it fails of
                log.info("%s: %s", config["model"], _describe_findings(report))
            return _parse_report(report, path, stamp)
        detail = problem.strip()[-OUTPUT_CHARS_MAX:] or f"exit code {code}"
        raise ModelSizeError(f"its size can't be read: {detail}; try `warmline doctor {config['model']}`")

    def _read_file(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found = json.loads(disk.read_file(self._file))
            if isinstance(found, dict):
                return found
        return {}

    def _remember(self, key: str, report: SizeReport) -> None:
        if not report.stamp:
            return
        entry = {"stamp": report.stamp, "size": asdict(report.size), "machine_bytes": report.machine_bytes}
        try:
            disk.replace_file(self._file, json.dumps({**self._read_file(), key: entry}, indent=1))
        except OSError as error:
            log.warning("sizes of models can't be remembered: %s", error)


def _format_key(config: ResolvedConfig, path: str) -> str:
    settings = {setting.name: config[setting.name] for setting in list_settings("doctor")}
    return json.dumps([path, version(), settings], sort_keys=True)


def _read_stamp(path: str, config: ResolvedConfig) -> str:
    """Times of configs and weights; "" for a name in the hub's cache, which may mean another folder the next time."""
    folders = [Path(str(folder)) for folder in (path, config["adapter_path"], config["draft_model"]) if folder]
    if not all(folder.is_dir() for folder in folders[1:]):
        return ""
    files = [
        file
        for folder in folders
        for pattern in ("config.json", "adapter_config.json", "*.safetensors")
        for file in sorted(folder.glob(pattern))
    ]
    with suppress(OSError):
        return " ".join(f"{file.name}:{file.stat().st_mtime_ns}:{file.stat().st_size}" for file in files)
    return ""


def _parse_entry(path: str, entry: object, stamp: str) -> SizeReport | None:
    with suppress(*UNREADABLE):
        if isinstance(entry, dict) and stamp and entry["stamp"] == stamp:
            return SizeReport(path, stamp, convert(entry["size"], ModelSize), int(entry["machine_bytes"]))
    return None


def _parse_report(report: Any, path: str, stamp: str) -> SizeReport:
    """Raises UNREADABLE."""
    memory = report["memory"]
    return SizeReport(path, stamp, convert(memory["load"], ModelSize), int(memory["machine_bytes"]))


def _describe_findings(report: Any) -> str:
    failed = [finding for finding in report["findings"] if finding["level"] == FAIL]
    texts = [f"{each['what']}" + (f" ({each['todo']})" if each["todo"] else "") for each in failed]
    return "; ".join(texts)[:OUTPUT_CHARS_MAX] or "it can't be served: see `warmline doctor`"


async def _run_process(arguments: list[str], environment: Mapping[str, str], pipe: int) -> tuple[int, str, str]:
    """Exit code and output of a process, which a cancel ends, and the end of this process, by its parent pipe."""
    process = await asyncio.create_subprocess_exec(
        *arguments,
        env={**environment, PARENT_PIPE: str(pipe)},
        pass_fds=(pipe,),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")
