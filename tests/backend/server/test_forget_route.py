"""POST /kv/forget: no product object holds a deleted prompt's text or tokens."""

import gc
import types
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.backend.live_backend import BODY, LiveBackend, read_result, with_backend
from warmline_common.protocol.messages import ClearCacheRequest
from warmline_common.protocol.tokens import pack_tokens, unpack_tokens

FolderOf = Callable[..., Path]
CANARY = "canary-in-the-backend"
SAID = {**BODY, "messages": [{"role": "user", "content": f"{CANARY} is what I say. " * 5}]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": CANARY}}}


def test_forget_releases_all_prompt_text_and_tokens(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        prompt = await backend.render_prompt(SAID)
        waiting = await backend.render_prompt({**SAID, "response_format": FORM})
        async with backend.start_generation("a", prompt) as response:
            assert (await read_result(response)).resident
        tokens = unpack_tokens(prompt.tokens)[20:60]
        assert len(find_objects_holding(CANARY, tokens)) >= 2
        (resident,) = backend.service.list_residents(with_ids=False).residents
        for kept in (resident.id, "a"):
            status, _ = await backend.request_json("POST", "/kv/forget", ClearCacheRequest(keep=[kept]))
            assert status == 200 and backend.service.list_residents(with_ids=False).residents == [resident]
        status, _ = await backend.request_json("POST", "/kv/forget")
        assert status == 200 and backend.service.list_residents(with_ids=False).residents == []
        del resident
        async with backend.start_generation("b", waiting) as response:
            assert response.status == 410, "it is rendered again by who still wants it"
        assert (await backend.request_json("DELETE", "/requests/a"))[0] == 404
        del prompt, waiting, response
        assert find_objects_holding(CANARY, tokens) == []

    with_backend(tiny_folder("llama"), tmp_path, work)


def find_objects_holding(text: str, tokens: list[int]) -> list[str]:
    """Find objects of the process, except this test's, with an attribute or element that has the text or the tokens."""
    gc.collect()
    packed, found = pack_tokens(tokens), []
    for holder in gc.get_objects():
        if isinstance(holder, types.ModuleType | types.FrameType | types.CodeType | types.CellType):
            continue
        for value in gc.get_referents(holder):
            if isinstance(value, str) and text in value and value not in KNOWN:
                found.append(f"{type(holder)}: text")
            elif isinstance(value, bytes) and (packed in value or text.encode() in value):
                found.append(f"{type(holder)}: bytes")
            elif isinstance(value, array | np.ndarray) and packed in value.tobytes():
                found.append(f"{type(holder)}: array")
            elif type(value) is list and len(value) > len(tokens) and is_containing(value, tokens):
                found.append(f"{type(holder)}: tokens")
    return found


def is_containing(values: list[object], tokens: list[int]) -> bool:
    starts = (at for at, each in enumerate(values) if isinstance(each, int) and each == tokens[0])
    return any(values[at : at + len(tokens)] == tokens for at in starts)


KNOWN = {CANARY, SAID["messages"][0]["content"]}
