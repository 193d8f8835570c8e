"""GET /kv/residents: all residents, what has changed, and those that are named."""

from collections.abc import Callable
from pathlib import Path

from msgspec import convert

from support.backend.live_backend import BODY, LiveBackend, read_result, with_backend
from warmline_common.protocol.messages import RESIDENT_IDS_MAX, ResidentsReply


def test_residents_route_lists_changes_and_named_residents(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        async def list_residents(query: str) -> ResidentsReply:
            status, body = await backend.request_json("GET", f"/kv/residents{query}")
            assert status == 200
            return convert(body, ResidentsReply)

        prompt = await backend.render_prompt(BODY)
        for name in ("a", "b"):
            async with backend.start_generation(name, prompt) as response:
                assert (await read_result(response)).resident
        every = await list_residents("?ids=1")
        first, second = every.residents
        assert every.since == 0 and first.ids and second.ids
        assert (await list_residents(f"?ids={second.id},none")).residents == [second]
        assert await backend.service.delete_resident(first.id)
        changes = await list_residents(f"?since={every.revision}")
        assert (changes.since, changes.residents, changes.removed) == (every.revision, [], [first.id])
        complete = await list_residents("?since=0")
        assert [(each.id, each.ids) for each in complete.residents] == [(second.id, None)]
        for query in ("?since=x", f"?ids={'a,' * RESIDENT_IDS_MAX}b"):
            assert (await backend.request_json("GET", f"/kv/residents{query}"))[0] == 400

    with_backend(tiny_folder("llama"), tmp_path, work)
