"""What the proxy would have the backend give up first."""

from warmline_proxy.mirror import Held, Mirror
from warmline_wire.keys import pack_tokens

ROOT, OTHER = b"r" * 16, b"o" * 16


def held(count: int, root: bytes = ROOT, positions: tuple[int, ...] = ()) -> Held:
    return Held(root, pack_tokens(range(count)), positions)


def test_what_another_holds_too_goes_first_then_what_is_on_disk() -> None:
    mirror = Mirror()
    mirror.add("nowhere else", Held(ROOT, pack_tokens([9, 9, 9])))
    mirror.add("durable", Held(ROOT, pack_tokens([7, 7])))
    mirror.add("short", held(10))
    mirror.add("long", held(20))
    mirror.mark_durable("durable")
    mirror.mark_durable("gone meanwhile")
    assert mirror.drop_order() == ["short", "durable"]


def test_another_tenants_tokens_or_a_longer_one_that_cant_go_on_there_cover_nothing() -> None:
    mirror = Mirror()
    mirror.add("short", held(10))
    mirror.add("foreign", held(30, OTHER))
    mirror.add("hybrid", held(20, positions=(15, 20)))
    assert mirror.drop_order() == []
    mirror.add("hybrid", held(20, positions=(10, 20)))
    assert mirror.drop_order() == ["short"]
