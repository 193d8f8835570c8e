"""Prewarming: the prompts of configured files and clients, and of files that commands name, are computed in quiet.

Each configured one is looked up with each backend process, and computed where it is not stored: after a start, and
after an upgrade, whose fingerprint no stored KV has.  What was evicted meanwhile is computed with the next start of the
proxy, not before: else two entries that don't fit into the disk budget together would evict each other for ever.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from warmline_common.settings.prewarm import PrewarmEntry
from warmline_proxy.audit.quiet import QuietEngine
from warmline_proxy.auth.key_store import KeyNotFoundError
from warmline_proxy.auth.principals import Client, ClientKeys
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import ClientError, decode_error_body, too_many_requests
from warmline_proxy.index.index import IndexStoreError
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.prewarm.calls import PrewarmError, make_head_call, read_prompt_file
from warmline_proxy.prewarm.computation import PreparedPrompt, PromptComputer, find_pinned_session
from warmline_proxy.prewarm.heads import HeadStore
from warmline_proxy.prewarm.reports import FAILED, PREWARMING, STORED, WAITING, PrewarmReply, PrewarmReport
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import OK
from warmline_proxy.store.rows import PREWARM_CLIENT, SessionRow
from warmline_proxy.upstream.client import UpstreamError

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2  # between looks for quiet and for models that were loaded
COMMANDS_MAX = 16  # that are remembered, or wait
COMMAND_NAME = "command"
TRIES_MAX = 3  # with one backend process, where that fails
RETRY_AFTER_S = 60


@dataclass(eq=False)
class PrewarmJob:
    """An entry, configured or a command's, with its state."""

    entry: PrewarmEntry
    backend: Backend
    report: PrewarmReport
    quiet_s: float  # that is required
    boots: int = -1  # of the backend process that it was looked up with
    tries: int = 0
    computed: set[tuple[bytes, bytes]] = field(default_factory=set)  # names of prompts, each computed once
    request: Request | None = None  # under way

    @property
    def session_name(self) -> str:
        return PREWARM_CLIENT + (COMMAND_NAME if self.report.id else self.entry.name)

    @property
    def is_loaded(self) -> bool:
        return self.backend.gate.is_open and self.backend.watchdog.is_up

    @property
    def is_due(self) -> bool:
        """A command's is done once, a configured one with each backend process."""
        is_over = bool(self.report.id) and self.report.state in (STORED, FAILED)
        return self.is_loaded and self.boots != self.backend.watchdog.boots and not is_over

    def describe(self) -> PrewarmReport:
        """Report with the progress of the prompt under way, or what it waits for."""
        report, request = self.report, self.request
        if request is not None:
            progress = {"progress_tokens": request.prefilled_tokens, "progress_total": request.log.prompt_tokens}
            return msgspec.structs.replace(report, **progress)
        if report.state != WAITING or self.is_loaded:
            return report
        name = self.backend.name if self.backend.model else ""
        reason = f"its model is not loaded: `warmline models load {name}`" if name else "the backend is not up"
        return msgspec.structs.replace(report, detail=reason)

    def set_state(self, state: str, detail: str = "") -> None:
        self.report.state, self.report.detail, self.report.at = state, detail, time.time()


@dataclass(eq=False)
class Prewarmer:
    """Jobs, and the task that works on one after the other, from `start` to `stop`.  Event loop thread."""

    config: ProxyConfig
    models: ServedModels
    keys: ClientKeys
    engines: Mapping[Backend, QuietEngine]
    computer: PromptComputer
    heads: HeadStore
    _configured: list[PrewarmJob] = field(default_factory=list, init=False)
    _commands: deque[PrewarmJob] = field(default_factory=deque, init=False)
    _has_command: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for entry in self.config.prewarm_entries:
            report = PrewarmReport(name=entry.name, client=entry.client, model=entry.model, pin=entry.pin)
            self._configured.append(
                PrewarmJob(entry, self._find_backend(entry.model), report, self.config.audit_quiet_s)
            )

    def start(self) -> None:
        self.heads.load([job.entry.name for job in self._configured if job.entry.client])
        self._task = asyncio.create_task(self._run(), name="prewarming")

    async def stop(self) -> None:
        """End the prompt under way; what is computed of it is saved."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})

    def describe(self) -> PrewarmReply:
        return PrewarmReply(entries=[job.describe() for job in (*self._configured, *self._commands)])

    async def add_command(self, entry: PrewarmEntry) -> PrewarmReport:
        """Have a file's prompt computed.  Raises PrewarmError, ClientError 429, UpstreamError."""
        done = [job for job in self._commands if job.report.state in (STORED, FAILED)]
        if len(self._commands) >= COMMANDS_MAX and not done:
            raise too_many_requests(f"{len(self._commands)} prompts wait to be computed ahead.", RETRY_AFTER_S)
        report = PrewarmReport(id=secrets.token_hex(4), name=entry.file, model=entry.model, pin=entry.pin)
        job = PrewarmJob(entry, self._find_backend(entry.model), report, quiet_s=0.0)
        for prompt in await self._prepare(job) if job.is_loaded else []:
            report.tokens += prompt.token_count
        if len(self._commands) >= COMMANDS_MAX:
            self._commands.remove(done[0])
        self._commands.append(job)
        self._has_command.set()
        return job.describe()

    def consider_request(self, request: Request) -> None:
        """Keep the head of a configured client's request, for the next start or upgrade."""
        if request.purged or request.log.outcome != OK or request.call is None:
            return
        for job in self._configured:
            if job.backend is request.assigned_backend and self._is_of_client(request, job.entry):
                is_new = self.heads.record(job.entry.name, request.call.fields)
                if is_new and (job.entry.pin or job.report.state == WAITING):  # else it is as the request has stored it
                    job.boots, job.tries = -1, 0

    def _is_of_client(self, request: Request, entry: PrewarmEntry) -> bool:
        if not entry.client:
            return False
        try:
            client = self._find_client(entry)
        except KeyNotFoundError:  # reported when its turn comes
            return False
        has_name = client.name == entry.client or request.user_agent.lower().startswith(entry.client.lower())
        return has_name and request.client.tenant == client.tenant and (not entry.key or request.client == client)

    def _find_backend(self, model: str) -> Backend:
        """Raises PrewarmError."""
        if not model or not self.models.has_keeper:
            return self.models.default
        if (backend := self.models.find(model)) is None:
            names = ", ".join(each.name for each in self.models.configs)
            raise PrewarmError(f"no model is called {model!r}; there are {names}")
        return backend

    def _find_client(self, entry: PrewarmEntry) -> Client:
        """Client whose requests are to be warm: of the named key, else of the key that is named like the client."""
        if entry.client and not entry.key:
            with suppress(KeyNotFoundError):
                return self.keys.find_client(entry.client)
        return self.keys.find_client(entry.key)

    async def _run(self) -> None:
        await self._unpin_removed()
        while True:
            self._has_command.clear()
            if (job := self._find_due()) is not None:
                await self._run_job(job)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S if self._configured or self._commands else None):
                    await self._has_command.wait()

    def _find_due(self) -> PrewarmJob | None:
        for job in (*self._commands, *self._configured):
            quiet_s = self.engines[job.backend].quiet_s
            if job.is_due and quiet_s is not None and quiet_s >= job.quiet_s:
                return job
        return None

    async def _run_job(self, job: PrewarmJob) -> None:
        boots = job.backend.watchdog.boots
        job.set_state(PREWARMING)
        try:
            is_done = await self.engines[job.backend].run(self._work(job), lambda: job.quiet_s)
        except (PrewarmError, KeyNotFoundError, ClientError) as error:
            message = decode_error_body(error).message if isinstance(error, ClientError) else str(error)
            self._fail(job, boots, message)
        except (UpstreamError, IndexStoreError, OSError) as error:
            job.tries += 1
            job.set_state(WAITING, str(error))
            if job.tries >= TRIES_MAX:
                self._fail(job, boots, str(error))
        except Exception:  # one entry must not end the task of all others
            log.exception("prewarming %s failed", job.entry.name)
            self._fail(job, boots, "an unexpected error, which is in the log")
        else:
            if is_done:
                job.boots, job.tries = boots, 0
            else:
                job.set_state(WAITING, "it made way for a request, and goes on from there")
        finally:
            job.request = None

    def _fail(self, job: PrewarmJob, boots: int, reason: str) -> None:
        job.boots, job.tries = boots, 0
        job.set_state(FAILED, reason)
        log.warning("prewarm %s: %s", job.entry.name, reason)

    async def _prepare(self, job: PrewarmJob) -> list[PreparedPrompt]:
        """Raises PrewarmError, KeyNotFoundError, UpstreamError."""
        entry, client = job.entry, self._find_client(job.entry)
        if self.config.reuse == "off":
            raise PrewarmError("nothing is stored with reuse = off: set it to fast or exact")
        if entry.file:
            call = await read_prompt_file(self.config.home.root / entry.file, entry.api)
            call, _ = self.computer.pipeline.steps.renderer.stabilize(call)
            return [await self.computer.prepare(job.backend, client, call, is_head=False)]
        calls = [make_head_call(fields) for fields in self.heads.list_heads(entry.name)]
        return [await self.computer.prepare(job.backend, client, call, is_head=True) for call in calls]

    async def _work(self, job: PrewarmJob) -> bool:
        """Look all prompts of a job up, and compute those that are not stored; True."""
        prompts = await self._prepare(job)
        if not prompts:
            job.set_state(WAITING, "no request of this client was seen yet")
            return True
        report, sessions, details = job.report, set[str](), list[str]()
        report.prompts, report.tokens = len(prompts), sum(prompt.token_count for prompt in prompts)
        for prompt in prompts:
            session, problem = await self._compute_prompt(job, prompt)
            sessions.add(session)
            details += [problem] if problem else []
        report.pinned = job.entry.pin and not details
        if not report.id:
            name, kept = job.session_name, sessions if job.entry.pin else set()
            await self.computer.unpin(lambda row: row.client == name and row.id not in kept)
        job.set_state(FAILED if details else STORED, "; ".join(dict.fromkeys(details)))
        log.log(
            logging.WARNING if details else logging.INFO,
            "prewarm %s: %s, tokens=%d computed=%d seconds=%.1f pinned=%s %s",
            *(job.entry.name, report.state, report.tokens, report.computed_tokens, report.seconds, report.pinned),
            report.detail,
        )
        return True

    async def _compute_prompt(self, job: PrewarmJob, prompt: PreparedPrompt) -> tuple[str, str]:
        """Its session, where it was computed or is pinned, and what is amiss, "" for nothing."""
        computer, pin = self.computer, job.entry.pin
        is_stored = await computer.check_stored(prompt)
        pinned = find_pinned_session(prompt, job.session_name, await computer.list_sessions()) if pin else None
        if is_stored and (pinned or not pin):
            return (pinned.id if pinned else ""), ""
        if not is_stored and prompt.name in job.computed:
            return "", "it was computed, and is stored no more: raise disk_budget_gb, or pin it"
        client = self._find_client(job.entry)

        def start(request: Request) -> None:
            job.request = request

        request = await computer.compute(job.backend, client, prompt, job.session_name, start)
        job.computed.add(prompt.name)
        record = request.log.build_record()
        job.report.computed_tokens += record.prefilled_tokens if not is_stored else 0
        job.report.seconds += request.log.total_s
        if not await computer.check_stored(prompt):
            return "", "it was computed, and could not be stored: the log says why, perhaps disk_budget_gb is too small"
        return request.log.session, (await computer.pin(request.log.session) if pin else "")

    async def _unpin_removed(self) -> None:
        """Unpin what entries pinned that are configured no more, or no longer to be pinned."""
        kept = {job.session_name for job in self._configured if job.entry.pin} | {PREWARM_CLIENT + COMMAND_NAME}

        def is_obsolete(row: SessionRow) -> bool:
            return row.client.startswith(PREWARM_CLIENT) and row.client not in kept

        try:
            await self.computer.unpin(is_obsolete)
        except (IndexStoreError, OSError) as error:
            log.warning("conversations that are prewarmed no more stay pinned: %s", error)
