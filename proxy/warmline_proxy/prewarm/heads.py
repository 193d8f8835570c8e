"""Last seen heads of configured clients' prompts, in a file of the home: after an upgrade they are rendered anew.

A client may have several, such as those of an agent and of its helpers: one a set of tools, the last seen of each.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from warmline_common.protocol.messages import decode, encode
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.api.base import Fields
from warmline_proxy.prewarm.calls import extract_head_fields
from warmline_proxy.tasks import BackgroundTasks

log = logging.getLogger(__name__)

HEADS_MAX = 4  # of a client; the longest unseen one goes
HEAD_BYTES_MAX = 1 << 20  # as JSON; larger ones are not kept
FILE_BYTES_MAX = 3 << 20  # of all clients; one that does not fit is not kept


class SeenHead(msgspec.Struct, kw_only=True):
    """Head of a client's prompt."""

    entry: str  # PrewarmEntry.name
    kind: str  # digest of its tools' names; "" for none
    seen_at: float  # Unix seconds
    fields: Fields  # as `extract_head_fields` returns them


@dataclass(eq=False)
class HeadStore:
    """Heads in memory and in HOME/prewarm/heads.json.  Event loop thread; the file is written on another one."""

    home: Home
    background: BackgroundTasks
    _heads: list[SeenHead] = field(default_factory=list, init=False)  # the last seen last
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def load(self, entries: Collection[str]) -> None:
        """Read the file, once, at the start; heads of entries that are configured no more are removed from it."""
        try:
            found = decode(disk.read_file(self.home.prompt_heads), list[SeenHead])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s can't be read, and is written anew: %s", self.home.prompt_heads, error)
            found = []
        self._heads = [head for head in found if head.entry in entries]
        if not self._heads or len(self._heads) < len(found):
            self._write(list(self._heads))

    def list_heads(self, entry: str) -> list[Fields]:
        """Heads of an entry, the last seen first."""
        return [head.fields for head in reversed(self._heads) if head.entry == entry]

    def record(self, entry: str, fields: Fields) -> bool:
        """Keep the head of a chat body; True where it is another than before."""
        head = SeenHead(entry=entry, kind="", seen_at=time.time(), fields=extract_head_fields(fields))
        if not head.fields or (size := len(encode(head.fields))) > HEAD_BYTES_MAX:
            return False
        head.kind = _digest_tool_names(head.fields.get("tools") or ())
        others = [each for each in self._heads if (each.entry, each.kind) != (entry, head.kind)]
        is_new = all(each.fields != head.fields for each in self._heads if each.entry == entry)
        own = [each for each in others if each.entry == entry]
        if len(own) >= HEADS_MAX:
            others.remove(own[0])
        if is_new and size + sum(len(encode(each.fields)) for each in others) > FILE_BYTES_MAX:
            return False
        self._heads = [*others, head]
        if is_new:
            self.background.spawn(self._save(), "last seen heads of prompts")
        return is_new

    def clear(self) -> None:
        """Forget all heads, for a purge."""
        self._heads = []
        self._write([])
        self.background.spawn(self._save(), "last seen heads of prompts")  # after a write under way

    async def _save(self) -> None:
        async with self._write_lock:
            await asyncio.to_thread(self._write, list(self._heads))

    def _write(self, heads: Sequence[SeenHead]) -> None:
        path = self.home.prompt_heads
        try:
            if heads:
                disk.make_folder(self.home.prewarm)
                disk.replace_file(path, encode(list(heads)))
            else:
                disk.delete(path)
        except OSError as error:
            log.warning("%s can't be written; clients' heads are kept until the proxy ends: %s", path, error.strerror)


def _digest_tool_names(tools: Sequence[object]) -> str:
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
    names = sorted(str(each.get("name")) for each in functions if isinstance(each, dict))
    return hashlib.sha256("\0".join(names).encode(errors="replace")).hexdigest()[:16] if names else ""
