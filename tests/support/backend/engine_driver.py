"""Scheduler driven turn by turn on the test's own thread: no threads, clocks or sockets."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from warmline_backend.generation.events import EndedEvent, GenerationEvent, PrefillProgress, TokenEvent
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.kv_cache.kv import NamedArrays
from warmline_backend.kv_cache.segment_io import ChainLoader, expose_bytes, write_segment_file
from warmline_backend.model.model import ServedModel
from warmline_backend.output.events import Text
from warmline_backend.request.params import GenerationParams
from warmline_backend.scheduler.scheduler import Scheduler, SchedulerSettings
from warmline_backend.speculation.speculation import Speculation
from warmline_common.protocol.messages import CheckpointRef, GenerationResult, SegmentRef
from warmline_common.protocol.tokens import TokenArray, pack_tokens, prefix_digests, unpack_tokens
from warmline_common.storage.segment_file import FileMeta

FINGERPRINT = "f" * 64
TURNS_MAX = 5000


@dataclass
class EventLog:
    """All events of one request."""

    events: list[GenerationEvent] = field(default_factory=list)

    @property
    def result(self) -> GenerationResult:
        ended = self.events[-1]
        assert isinstance(ended, EndedEvent), self.events[-3:]
        return ended.result

    @property
    def is_ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], EndedEvent)

    @property
    def reused(self) -> int:
        ended = self.events[-1]
        assert isinstance(ended, EndedEvent), self.events[-3:]
        return ended.reused_tokens

    @property
    def stop_reason(self) -> str:
        ended = self.events[-1]
        assert isinstance(ended, EndedEvent), self.events[-3:]
        return ended.stop_reason

    @property
    def generated(self) -> list[int]:
        return unpack_tokens(self.result.generated)

    @property
    def tokens(self) -> list[int]:
        """Tokens of the answer that were sent."""
        return [event.token for event in self.events if isinstance(event, TokenEvent)]

    @property
    def text(self) -> str:
        parts = (part for event in self.events if isinstance(event, TokenEvent) for part in event.parts)
        return "".join(part.text for part in parts if isinstance(part, Text))

    @property
    def logprobs(self) -> list[float]:
        return [event.logprobs.logprob for event in self.events if isinstance(event, TokenEvent) and event.logprobs]

    @property
    def chunks(self) -> list[int]:
        """Ends of the prefill chunks."""
        return [event.done for event in self.events if isinstance(event, PrefillProgress) and event.done]


class SchedulerDriver:
    """Scheduler with shortcuts for tests."""

    def __init__(
        self,
        served: ServedModel,
        *,
        step: int = 2048,
        budget: int = 1 << 30,
        places: int = 32,
        keeps: bool = True,
        exact: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        settings = SchedulerSettings(
            boot="test",
            memory_budget_bytes=budget,
            prefill_step_size=step,
            running_count_max=places,
            keeps_residents=keeps,
            exact=exact,
        )
        self.served, self.scheduler = served, Scheduler(served, settings, speculation=speculation)
        self._count = 0

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        resident: str = "",
        follow: str = "",
        reuse: int = 0,
        keep: bool = False,
        prediction: Sequence[int] = (),
        background: bool = False,
        root: bytes = b"",
        checkpoints: tuple[int, ...] = (),
        **params: object,
    ) -> tuple[str, EventLog]:
        self._count += 1
        name, log = f"r{self._count}", EventLog()
        wanted = GenerationParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})
        generation = GenerationRequest(
            name,
            prompt,
            wanted,
            log.events.append,
            resident_id=resident,
            leader_id=follow,
            reuse_tokens=reuse,
            copy_resident=keep,
            leaves_resident=not background,
            prediction=TokenArray(prediction),
            background=background,
            root=root,
            checkpoints=checkpoints,
        )
        self.scheduler.submit(generation)
        return name, log

    def step(self) -> None:
        """Run one whole turn."""
        for _ in self.scheduler.step():
            pass

    def run_until(self, done: Callable[[], bool]) -> None:
        for _ in range(TURNS_MAX):
            if done():
                return
            self.step()
        raise AssertionError("the scheduler did not get there")

    def mark_saved(self, log: EventLog) -> str:
        """Mark a request's resident as saved, as after the proxy's save; returns its id."""
        result = log.result
        self.scheduler.save_source.mark_saved(result.resident, "", result.prefilled_until)
        return result.resident

    def run(self, prompt: list[int], max_tokens: int = 8, **options: object) -> EventLog:
        """Run one request alone, to its end."""
        _, log = self.submit(prompt, max_tokens, **options)
        self.run_until(lambda: log.is_ended)
        return log


class SavableKV(Protocol):
    """The parts of a KV that are saved."""

    tokens: list[int]
    checkpoints: dict[int, NamedArrays]

    def slice_rows(self, start: int, end: int) -> NamedArrays: ...


def save_segments(
    kv: SavableKV, folder: Path, cuts: list[int], *, is_coded: bool = False
) -> tuple[list[SegmentRef], list[CheckpointRef]]:
    """Write `kv` as segments that end at `cuts`, and all of its checkpoints."""
    chain, start, root = [], 0, b""
    prefixes = prefix_digests(root, pack_tokens(kv.tokens), range(len(kv.tokens) + 1))
    for end in cuts:
        name = f"{len(chain):032x}"
        meta = FileMeta(
            kind="segment",
            id=name,
            fingerprint=FINGERPRINT,
            root=root.hex(),
            prefix=prefixes[start],
            start=start,
            end=end,
        )
        tensors = expose_bytes(kv.slice_rows(start, end))
        tokens = pack_tokens(kv.tokens[start:end])
        write_segment_file(folder / f"{name}.safetensors", meta, tensors, tokens, is_coded=is_coded)
        chain.append(SegmentRef(id=name, start=start, end=end, upto=end))
        start = end
    checkpoints = []
    for position, state in kv.checkpoints.items():
        name = f"c{position:031x}"
        meta = FileMeta(
            kind="checkpoint",
            id=name,
            fingerprint=FINGERPRINT,
            root=root.hex(),
            prefix=prefixes[position],
            start=0,
            end=0,
            position=position,
        )
        write_segment_file(folder / f"{name}.safetensors", meta, expose_bytes(state), is_coded=is_coded)
        checkpoints.append(CheckpointRef(id=name, position=position))
    return chain, checkpoints


def make_loader(served: ServedModel, folder: Path, pool: ThreadPoolExecutor) -> ChainLoader:
    return ChainLoader(
        served.layout,
        served.row_names,
        FINGERPRINT,
        lambda name: folder / f"{name}.safetensors",
        pool,
        lambda work: work(),
    )


def cut_chain(chain: list[SegmentRef], position: int) -> list[SegmentRef]:
    """List the segments up to `position`, the last one used in part."""
    return [
        SegmentRef(id=link.id, start=link.start, end=link.end, upto=min(link.end, position))
        for link in chain
        if link.start < position
    ]
