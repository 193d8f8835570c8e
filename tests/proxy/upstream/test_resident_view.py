"""View of the residents in the backend's memory."""

from pathlib import Path

from support.proxy.fake_backend import make_layout
from support.proxy.harness import on_loop, run_proxy
from warmline_common.protocol.messages import Resident, ResidentsReply
from warmline_common.protocol.tokens import pack_tokens
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.resident_view import ResidentEntry, ResidentView

ROOT, OTHER = b"r" * 16, b"o" * 16


def make_entry(count: int, root: bytes = ROOT, positions: tuple[int, ...] = ()) -> ResidentEntry:
    return ResidentEntry(root, pack_tokens(range(count)), positions)


def test_durable_ids_are_those_on_disk_oldest_first() -> None:
    view = ResidentView()
    view.add("first", make_entry(10))
    view.add("nowhere else", make_entry(20))
    view.add("last", make_entry(30))
    for name in ("last", "first", "gone meanwhile"):
        view.mark_durable(name)
    assert view.durable_ids() == ["first", "last"]


def test_candidates_share_tokens_and_namespace() -> None:
    view = ResidentView()
    view.add("mine", make_entry(10, positions=(4, 10)))
    view.add("theirs", make_entry(30, OTHER))
    found = view.candidates(ROOT, pack_tokens([*range(8), 99]))
    assert [(each.resident, each.common_tokens, each.positions) for each in found] == [("mine", 8, (4, 10))]


def test_residents_without_root_are_not_adopted() -> None:
    view, tokens = ResidentView(), pack_tokens(range(10))
    with_root, without_root = (
        Resident(id=name, tokens=10, positions=[], bytes_held=1, last_used=0.0, ids=tokens, root=root)
        for name, root in (("said", OTHER), ("unsaid", b""))
    )
    view.update(ResidentsReply(boot="b", generation=0, residents=[with_root, without_root]), known_ids=())
    assert view.ids() == {"said"}
    assert [each.resident for each in view.candidates(OTHER, tokens)] == ["said"]
    assert not view.candidates(ROOT, tokens) and not view.candidates(b"", tokens)


def test_turn_tail_extends_common_prefix() -> None:
    view = ResidentView()
    view.add("mine", ResidentEntry(ROOT, pack_tokens(range(8)), turn_end=12, turn_tail=pack_tokens(range(8, 12))))

    def common(ids: list[int]) -> int:
        return view.candidates(ROOT, pack_tokens(ids))[0].common_tokens

    assert common([*range(20)]) == 12, "its own next turn"
    assert common([*range(10), 99]) == 10, "one that only begins as it does"
    assert common([*range(5), 99]) == 5


@on_loop
async def test_status_of_loading_model_is_fetched_again(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        upstream = Upstream(proxy.backend_url, proxy.home.load_secret())
        backend_state = BackendState(upstream)
        proxy.backend.layout = None  # type: ignore[assignment]
        assert (await backend_state.status()).layout is None
        proxy.backend.layout = make_layout()
        assert (await backend_state.status()).layout == make_layout()
        await upstream.close()
