"""Residents' listing, bytes and order of eviction: what changes is told, and nothing is counted anew."""

from pathlib import Path

import pytest

from support.backend.families import load_family
from warmline_backend.kv_cache import resident_listing
from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.resident_listing import ResidentListing, omit_tokens
from warmline_backend.kv_cache.residents import Residents
from warmline_common.protocol.messages import Resident


def make_resident(name: str) -> Resident:
    return Resident(id=name, tokens=1, positions=[], bytes_held=1, last_used=0.0, ids=b"1234")


def list_ids(residents: list[Resident]) -> list[str]:
    return [each.id for each in residents]


def test_changes_since_a_revision_are_listed() -> None:
    listing = ResidentListing()
    for name in ("a", "b", "c"):
        listing.add(make_resident(name))
    first = listing.list_changes(0)
    assert (first.since, list_ids(first.residents), first.removed) == (0, ["a", "b", "c"], [])
    listing.remove("b")
    listing.remove("never there")
    listing.add(make_resident("d"))
    listing.update("a", bytes_held=7, last_used=1.0)
    later = listing.list_changes(first.revision)
    assert (later.since, list_ids(later.residents), later.removed) == (first.revision, ["d"], ["b"])
    assert later.revision == first.revision + 2
    nothing = listing.list_changes(later.revision)
    assert (nothing.residents, nothing.removed, nothing.since) == ([], [], later.revision)
    assert list_ids(listing.find(["d", "b", "a"])) == ["d", "a"] and listing.list_residents()[0].bytes_held == 7
    assert omit_tokens(listing.find(["d"]))[0].ids is None and listing.find(["d"])[0].ids == b"1234"


def test_listing_is_complete_where_removals_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_listing, "REMOVALS_MAX", 2)
    listing = ResidentListing()
    for name in "abcde":
        listing.add(make_resident(name))
    for name in "abc":
        listing.remove(name)
    assert listing.list_changes(6).removed == ["b", "c"]
    forgotten = listing.list_changes(5)
    assert (forgotten.since, list_ids(forgotten.residents), forgotten.removed) == (0, ["d", "e"], [])
    assert listing.list_changes(99).since == 0, "of another process"


def make_kv(root: Path, tokens: int) -> KV:
    kv = load_family("llama", root).make_kv(journals=False)
    kv.tokens.extend(range(tokens))
    return kv


def set_bytes(residents: Residents, name: str, count: int) -> None:
    residents.bytes_held += count - residents._entries[name].bytes_held
    residents._entries[name].bytes_held = count


def test_order_of_eviction_is_extended(tmp_path: Path) -> None:
    residents = Residents(budget_bytes=1000)
    names = [residents.add(make_kv(tmp_path, 3), lease_s=0.0) for _ in range(6)]
    for name in names:
        set_bytes(residents, name, 100)
    residents.set_eviction_order([names[3], "gone"])
    residents.set_eviction_order([names[5], names[3]], extends=True)
    assert residents.can_make_room(600, only_ranked=True) and not residents.can_make_room(601, only_ranked=True)
    assert residents.make_room(700)
    assert list_ids(residents.listing.list_residents()) == [names[1], names[2], names[4]], (
        "ranked first, then the oldest"
    )
    assert (residents.bytes_held, residents.generation, len(residents)) == (300, 3, 3)
    residents.set_eviction_order([names[4]])
    assert residents.make_room(800) and names[4] not in residents and names[1] in residents
    leased = residents.add(make_kv(tmp_path, 3), lease_s=1000.0)
    set_bytes(residents, leased, 500)
    assert residents.has_leased and not residents.make_room(501) and leased in residents
    residents.evict_unleased()
    assert list_ids(residents.listing.list_residents()) == [leased] and residents.bytes_held == 500
    assert residents.delete(leased) and not residents.delete(leased) and residents.bytes_held == 0
    assert not residents.has_leased
