"""State machine: saves, evictions, quarantines, purges and restarts in any order, against a plain set of texts."""

import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.index.indexes import ROOT, begin_save, commit_save, make_home, short_segments
from warmline_common.protocol.tokens import namespace, pack_tokens, unpack_tokens
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import PurgeRequest, SavePlan, SessionRow

ROOTS = (ROOT, namespace("model-b"))
Text = tuple[int, ...]


def count_shared(a: Text, b: Text) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class IndexMachine(RuleBasedStateMachine):
    """Model of the index: the root and the text up to the end (or position) of each file; no tree."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.home = make_home(self.folder / "home")
        self.index = Index(self.home, 1 << 30)
        self.segments: dict[str, tuple[bytes, Text]] = {}
        self.states: dict[str, tuple[bytes, Text]] = {}
        self.pending: list[SavePlan] = []
        self.leased: list[str] = []
        self.texts: list[Text] = [()]

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()
            shutil.rmtree(self.folder)

    @rule(base=st.integers(0, 99), keep=st.floats(0, 1), tail=st.integers(1, 400), token=st.integers(1, 3))
    def think_of_a_text(self, base: int, keep: float, tail: int, token: int) -> None:
        """Make a new text, mostly with the beginning of an old one; `tail` gives odd lengths and cuts."""
        old = self.texts[base % len(self.texts)]
        text = old[: round(len(old) * keep)] + tuple((token + at // 7) % 4 for at in range(tail))
        self.texts.append(text)

    @rule(
        text=st.integers(0, 99),
        length=st.floats(0.1, 1),
        states=st.lists(st.integers(1, 400), max_size=3),
        root=st.sampled_from(ROOTS),
        may_replace=st.booleans(),
    )
    def begin(self, text: int, length: float, states: list[int], root: bytes, may_replace: bool) -> None:
        whole = self.texts[-1 - text % len(self.texts)]
        ids = whole[: round(len(whole) * length)]
        with short_segments():
            plan = begin_save(self.index, ids, states, root, may_replace)
        if plan is not None:
            assert plan.matched == self.expected(root, ids)
            self.pending.append(plan)
        else:
            assert self.expected(root, ids) == len(ids)

    @rule(
        base=st.integers(0, 4),
        keep=st.sampled_from([1.0, 1.0, 0.98, 0.5]),
        tail=st.integers(1, 100),
        token=st.integers(1, 3),
        states=st.lists(st.floats(0, 1), max_size=3),
        root=st.sampled_from(ROOTS),
    )
    def converse(self, base: int, keep: float, tail: int, token: int, states: list[float], root: bytes) -> None:
        """Save a turn as the proxy would: a text continues, or diverges near its end."""
        self.think_of_a_text(-1 - base, keep, tail, token)
        ids = self.texts[-1]
        with short_segments():
            plan = begin_save(self.index, ids, [round(len(ids) * share) for share in states], root)
        if plan is not None:
            self.pending.append(plan)
            self.commit(-1, len(ids) - 1)

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 9), turn_end=st.integers(0, 400))
    def commit(self, which: int, turn_end: int) -> None:
        plan = self.pending.pop(which % len(self.pending))
        text = tuple(unpack_tokens(plan.tokens))
        committed = commit_save(self.index, plan, turn_end)
        for spec in plan.segments:
            self.segments[spec.id] = (plan.root, text[: spec.end])
        for ref in plan.checkpoints:
            self.states[ref.id] = (plan.root, text[: ref.position])
        self.forget(committed.removed)
        if not committed.why_not:
            assert self.expected(plan.root, text) == len(text)
            assert committed.session

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        self.index.abort_save(self.pending.pop(which % len(self.pending)))

    @precondition(lambda self: self.segments)
    @rule(share=st.floats(0.1, 1))
    def evict(self, share: float) -> None:
        used = self.index.totals()
        files = used.bytes_segments + used.bytes_checkpoints
        with mock.patch.object(self.index, "budget_bytes", int(used.bytes_used - files * share)):
            gone = self.index.make_room()
        assert not set(gone) & set(self.leased)
        self.forget(gone)

    @precondition(lambda self: self.segments or self.states)
    @rule(which=st.integers(0, 99))
    def quarantine(self, which: int) -> None:
        ids = [*self.segments, *self.states]
        bad = ids[which % len(ids)]
        gone = self.index.quarantine(bad, "checksum")
        assert bad in gone
        self.forget(gone)

    @precondition(lambda self: self.index.sessions())
    @rule(which=st.integers(0, 9))
    def purge(self, which: int) -> None:
        """Purge to the token: other texts stay whole, and only their tokens are left of this one."""
        sessions = self.index.sessions()
        row = sessions[which % len(sessions)]
        texts = {each.id: (each.root, self.text_of(each)) for each in sessions}
        preview = purge(self.index, PurgeRequest(session=row.id, dry_run=True))
        reply = purge(self.index, PurgeRequest(session=row.id))
        assert (preview.sessions, preview.segments, preview.bytes_freed) == (
            reply.sessions,
            reply.segments,
            reply.bytes_freed,
        )
        self.forget([*reply.segments, *reply.checkpoints])
        for cut in reply.cuts:
            root, text = self.segments.pop(cut.segment)
            self.segments[cut.became] = (root, text[: cut.until])
        left = {each.id: texts[each.id] for each in self.index.sessions()}
        assert left.keys() == texts.keys() - set(reply.sessions)
        root_texts = [text for root, text in left.values() if root == row.root]
        self.is_stored(
            row.root, texts[row.id][1], max((count_shared(texts[row.id][1], text) for text in root_texts), default=0)
        )
        for root, text in left.values():
            self.is_stored(root, text, len(text))

    def text_of(self, row: SessionRow) -> Text:
        return tuple(unpack_tokens(self.index.path_tokens(row.leaf)))[: row.tokens]

    def is_stored(self, root: bytes, text: Text, tokens: int) -> None:
        assert self.index.match_prefix(root, pack_tokens(text), len(text)).tokens == tokens

    @precondition(lambda self: self.segments)
    @rule(which=st.integers(0, 99))
    def lease(self, which: int) -> None:
        self.leased.append(list(self.segments)[which % len(self.segments)])
        self.index.lease(self.leased[-1:])
        self.index.record_use(self.leased[-1:])

    @precondition(lambda self: self.leased)
    @rule()
    def release(self) -> None:
        self.index.release([self.leased.pop(0)])

    @rule()
    def repair(self) -> None:
        """At any moment, saves under way included: what is whole is left alone."""
        self.index.flush()  # else the use of a leased file may be written in between
        before = self.index.snapshot()
        assert repair(self.index, deep=False, is_saving=True).did == []
        assert self.index.snapshot() == before

    @rule()
    def lose_the_index(self) -> None:
        """Delete the index; everything is found again in the files."""
        self.restart(again=False)  # what was about to be deleted is
        self.index.close()
        shutil.rmtree(self.home.index)
        self.index = Index(self.home, 1 << 30)
        reconcile(self.index)

    @rule(again=st.booleans())
    def restart(self, again: bool) -> None:
        self.index.close()
        self.index = Index(self.home, 1 << 30)
        self.leased = []
        reconcile(self.index)
        self.pending = self.pending if again else []  # a save may end after the restart of who began it

    def forget(self, ids: list[str]) -> None:
        for file_id in ids:
            self.segments.pop(file_id, None)
            self.states.pop(file_id, None)

    def expected(self, root: bytes, text: Text) -> int:
        return max((count_shared(stored, text) for where, stored in self.segments.values() if where == root), default=0)

    @invariant()
    def matches_what_is_stored(self) -> None:
        if not hasattr(self, "index"):
            return
        for root in ROOTS:
            for text in self.texts[-4:]:
                found = self.index.match_prefix(root, pack_tokens(text), len(text))
                assert found.tokens == self.expected(root, text)
                assert [ref.position for ref in found.checkpoints] == sorted(
                    len(prefix)
                    for where, prefix in self.states.values()
                    if where == root and len(prefix) <= found.tokens and text[: len(prefix)] == prefix
                )
                edges = [0, *(ref.upto for ref in found.chain)]
                assert [ref.start for ref in found.chain] == edges[:-1] and edges[-1] == found.tokens

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "index"):
            return
        assert verify_index(self.index) == []
        assert {row.id for row in self.index.segments()} == set(self.segments)
        assert all(self.home.segment_file(file_id).exists() for file_id in {*self.segments, *self.states})


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestIndexMachine = IndexMachine.TestCase
