"""Owners of stored conversations: keys are added, removed and added again under the same name."""

import msgspec
import pytest

from support.index.indexes import LAYOUT, MODEL, write_plan
from warmline_common.protocol.tokens import namespace, pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.auth.key_store import KeyNotFoundError
from warmline_proxy.auth.owners import (
    NO_KEY_LABEL,
    REMOVED_LABEL,
    SHARED_LABEL,
    KeyTenants,
    OwnerLabels,
    build_owner_labels,
    find_fingerprints,
    load_key_tenants,
)
from warmline_proxy.explain.explain import explain
from warmline_proxy.index.index import Index
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.store.rows import RequestRecord, SessionUpdate

TALK = list(range(1000, 1200))
OTHER_MODEL = "model-b"


def store_under_key(index: Index, tenant: str, model: str = MODEL) -> bytes:
    """Store a conversation under a key; its root."""
    root = namespace(model, tenant)
    plan = index.begin_save(SaveIntent(root, MODEL, pack_tokens(TALK), LAYOUT))
    assert plan is not None
    index.commit_save(plan, write_plan(index.home, plan, model), prefill_s=1.0, session=SessionUpdate(turn_end=0))
    return root


def build_labels(index: Index, client_key: str = "", share_cache: bool = False) -> OwnerLabels:
    keys = load_key_tenants(index.home, client_key=client_key, share_cache=share_cache)
    return build_owner_labels(keys, find_fingerprints(index.home, index.segments()))


def test_new_key_with_same_name_is_another_owner(index: Index) -> None:
    nobody = store_under_key(index, "")
    assert build_labels(index).find_label(nobody) == "", "where there was never a key nothing is said"
    old = store_under_key(index, keys_file.add_key(index.home, "default").tenant)
    keys_file.remove_key(index.home, "default")
    assert [build_labels(index).find_label(root) for root in (nobody, old)] == [NO_KEY_LABEL, REMOVED_LABEL]
    new = store_under_key(index, keys_file.add_key(index.home, "default").tenant)
    elsewhere = store_under_key(index, keys_file.add_key(index.home, "laptop").tenant, OTHER_MODEL)
    roots = (nobody, old, new, elsewhere)
    assert [build_labels(index).find_label(root) for root in roots] == [
        NO_KEY_LABEL,
        REMOVED_LABEL,
        "default",
        "laptop",
    ]
    assert [build_labels(index, share_cache=True).find_label(root) for root in roots] == [
        SHARED_LABEL,
        REMOVED_LABEL,
        "default",
        "laptop",
    ]
    keys_file.rotate_key(index.home, "default")
    assert build_labels(index).find_label(new) == "default"
    of_settings = store_under_key(index, keys_file.derive_tenant("wl-settings"))
    assert (
        build_labels(index).find_label(of_settings) == REMOVED_LABEL
        and build_labels(index, "wl-settings").find_label(of_settings) == "environment"
    )


def test_one_file_header_is_read_per_root(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [store_under_key(index, tenant) for tenant in ("", "a")]
    header_reads: list[str] = []
    header_of = Home.segment_file
    monkeypatch.setattr(
        Home, "segment_file", lambda home, file_id: header_reads.append(file_id) or header_of(home, file_id)
    )
    known = find_fingerprints(index.home, [*index.segments()] * 3)
    assert known == dict.fromkeys(roots, MODEL) and len(header_reads) == 2
    assert find_fingerprints(index.home, index.segments(), known) == known and len(header_reads) == 2


def test_owner_is_known_from_other_roots_of_model(index: Index) -> None:
    tenant = keys_file.add_key(index.home, "laptop").tenant
    lost, kept = store_under_key(index, tenant), store_under_key(index, "")
    (row,) = [row for row in index.segments() if row.root == lost]
    content = index.home.segment_file(row.id).read_bytes()
    index.home.segment_file(row.id).write_bytes(b"")
    assert [build_labels(index).find_label(root) for root in (lost, kept)] == ["laptop", NO_KEY_LABEL]
    (other,) = [row for row in index.segments() if row.root == kept]
    index.home.segment_file(row.id).write_bytes(index.home.segment_file(other.id).read_bytes())
    assert build_labels(index).find_label(lost) == "laptop", "a file of another root says nothing of this one"
    index.home.segment_file(row.id).write_bytes(content)


def test_owner_lookup_by_label(index: Index) -> None:
    olds = [store_under_key(index, tenant).hex() for tenant in ("gone", "gone too")]
    keys_file.add_key(index.home, "laptop")
    known = build_labels(index)
    assert known.find_roots("laptop") == [namespace(MODEL, keys_file.read_keys(index.home)[0].tenant).hex()], (
        "stored or not"
    )
    assert sorted(known.find_roots(REMOVED_LABEL)) == sorted(olds)
    for label in (f"{REMOVED_LABEL} {olds[0][:4]}", f"{REMOVED_LABEL} ({olds[0][:8]})", f"{REMOVED_LABEL} {olds[0]}"):
        assert known.find_roots(label) == olds[:1]
    for wrong in ("desktop", "", f"{REMOVED_LABEL} 0000", olds[0]):
        with pytest.raises(
            KeyNotFoundError, match=rf"no client key {wrong!r}; there are 'laptop', 'no key', 'a removed key'"
        ):
            known.find_roots(wrong)
    for wrong, meant in (("lapto", "laptop"), ("nokey", "no key"), ("removed key", "a removed key")):
        with pytest.raises(KeyNotFoundError, match=rf"no client key {wrong!r}; did you mean {meant!r}\?"):
            known.find_roots(wrong)
    with pytest.raises(KeyNotFoundError, match="there is none"):
        OwnerLabels().find_roots("laptop")


def test_key_named_shared_is_distinguished() -> None:
    known = build_owner_labels(KeyTenants(tenants={SHARED_LABEL: "t"}, is_shared=True), {namespace(MODEL): MODEL})
    assert known.find_roots(SHARED_LABEL) == [namespace(MODEL, "t").hex()]
    assert known.find_roots("shared by all keys") == [namespace(MODEL).hex()]


def test_record_of_removed_key_is_labelled(index: Index) -> None:
    old = store_under_key(index, keys_file.add_key(index.home, "default").tenant)
    keys_file.remove_key(index.home, "default")
    new = store_under_key(index, keys_file.add_key(index.home, "default").tenant)
    row = RequestRecord(id="r1", at=2e9, endpoint="chat", client_model="m", key="default", outcome="ok", source="cold")
    shown = [build_labels(index).format_key_name(msgspec.structs.replace(row, root=root)) for root in (old, new, b"")]
    assert shown == ["default (removed)", "default", "default"]
    session = next(each.id for each in index.sessions() if each.root == new)
    record = msgspec.structs.replace(
        row, root=new, session=session, why_not_warmer="nothing stored", prompt_tokens=len(TALK)
    )
    reply = explain(index, record, owner_labels=build_labels(index))
    assert (reply.request.key, reply.verdict.cause) == ("default", "removed-key")
    assert reply.verdict.detail == f"{len(TALK)} of its tokens are stored for a key that was removed"
    keys_file.add_key(index.home, "laptop")
    assert explain(index, record).verdict.detail.endswith("for another key, or for none")
