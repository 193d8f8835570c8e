"""What the proxy knows of the backend's memory."""

from pathlib import Path

from support.proxy.fake_backend import layout
from support.proxy.harness import on_loop, pair
from warmline_common.protocol.messages import Resident
from warmline_common.protocol.tokens import pack_tokens
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.resident_view import ResidentEntry, ResidentView

ROOT, OTHER = b"r" * 16, b"o" * 16


def held(count: int, root: bytes = ROOT, positions: tuple[int, ...] = ()) -> ResidentEntry:
    return ResidentEntry(root, pack_tokens(range(count)), positions)


def test_only_what_is_on_disk_may_be_given_up() -> None:
    mirror = ResidentView()
    mirror.add("first", held(10))
    mirror.add("nowhere else", held(20))
    mirror.add("last", held(30))
    for name in ("last", "first", "gone meanwhile"):
        mirror.mark_durable(name)
    assert mirror.durable_ids() == ["first", "last"]


def test_tokens_decide_and_never_another_namespace() -> None:
    mirror = ResidentView()
    mirror.add("mine", held(10, positions=(4, 10)))
    mirror.add("theirs", held(30, OTHER))
    found = mirror.candidates(ROOT, pack_tokens([*range(8), 99]))
    assert [(each.resident, each.common_tokens, each.positions) for each in found] == [("mine", 8, (4, 10))]


def test_only_what_says_whose_it_is_is_adopted() -> None:
    mirror, tokens = ResidentView(), pack_tokens(range(10))
    said, unsaid = (
        Resident(id=name, tokens=10, positions=[], bytes_held=1, last_used=0.0, ids=tokens, root=root)
        for name, root in (("said", OTHER), ("unsaid", b""))
    )
    mirror.add_listed([said, unsaid])
    assert mirror.ids() == {"said"}
    assert [each.resident for each in mirror.candidates(OTHER, tokens)] == ["said"]
    assert not mirror.candidates(ROOT, tokens) and not mirror.candidates(b"", tokens)


def test_a_conversation_is_told_from_another_past_the_end_of_its_resident() -> None:
    mirror = ResidentView()
    mirror.add("mine", ResidentEntry(ROOT, pack_tokens(range(8)), turn_end=12, turn_tail=pack_tokens(range(8, 12))))

    def common(ids: list[int]) -> int:
        return mirror.candidates(ROOT, pack_tokens(ids))[0].common_tokens

    assert common([*range(20)]) == 12, "its own next turn"
    assert common([*range(10), 99]) == 10, "one that only begins as it does"
    assert common([*range(5), 99]) == 5


@on_loop
async def test_what_a_backend_says_while_it_loads_is_asked_again(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        upstream = Upstream(proxy.backend_url, proxy.home.load_secret())
        knowledge = BackendState(upstream)
        proxy.backend.layout = None  # type: ignore[assignment]
        assert (await knowledge.status()).layout is None
        proxy.backend.layout = layout()
        assert (await knowledge.status()).layout == layout()
        await upstream.close()
