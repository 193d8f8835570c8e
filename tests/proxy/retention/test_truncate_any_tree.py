"""Property: any conversation of any tree can be purged to the token, and stored again."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from support.index.archives import check_content, save
from support.index.indexes import BUDGET, make_home
from support.index.truncation import ROOT, clear_tables, count_stored, find_files_containing, purge_session
from warmline_common.protocol.tokens import count_common_tokens, pack_tokens, unpack_tokens
from warmline_proxy.index import save as save_module
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.rows import SessionRow


@dataclass(frozen=True)
class TreeConversation:
    """Conversation that keeps a share of an earlier one; `base`: 0 the last one."""

    base: int
    keep: float
    tail: int
    states: list[float]


CONVERSATIONS = st.builds(
    TreeConversation,
    st.integers(0, 9),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.integers(2, 200),
    st.lists(st.floats(0.1, 1)),
)


@settings(max_examples=25)
@given(
    conversations=st.lists(CONVERSATIONS, min_size=2, max_size=6),
    order=st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_any_conversation_of_any_tree_is_purged_to_the_token(
    conversations: list[TreeConversation], order: list[int]
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Index(make_home(Path(folder)), BUDGET) as index,
        mock.patch.multiple(save_module, SEGMENT_TOKENS_MAX=150, SMALL_SEGMENT_TOKENS=70),
    ):
        save_conversations(index, conversations)
        for number in order:
            if sessions := sorted(index.sessions(), key=lambda row: row.client):
                check_purge(index, sessions, number % len(sessions))
        check_regrown(index)


def save_conversations(index: Index, conversations: Sequence[TreeConversation]) -> None:
    texts: list[list[int]] = [[]]
    for number, talk in enumerate(conversations, 1):
        old = texts[-1 - talk.base % len(texts)]
        texts.append([*old[: round(len(old) * talk.keep)], *range(number << 16, (number << 16) + talk.tail)])
        states = [max(1, round(share * len(texts[-1]))) for share in talk.states]
        save(index, texts[-1], states, client=f"{number}", may_replace=True)


def check_purge(index: Index, sessions: Sequence[SessionRow], number: int) -> None:
    texts = {row.id: unpack_tokens(index.path_tokens(row.leaf))[: row.tokens] for row in sessions}
    gone = texts[sessions[number].id]
    before = {row.id: list_checkpoints(index, texts[row.id]) for row in sessions}
    purge_session(index, sessions[number].id)
    remaining = [row.id for row in index.sessions()]
    assert {*remaining, sessions[number].id} == texts.keys()
    common = max((count_common_tokens(pack_tokens(gone), pack_tokens(texts[each])) for each in remaining), default=0)
    assert count_stored(index, gone) == common
    assert (
        len(gone) < common + 2
        or find_files_containing(index.home, gone[common : common + 2])
        == find_files_containing(index.home, gone[-2:])
        == []
    )
    for each in remaining:
        check_content(index, texts[each], checkpoints=before[each])
    assert verify_index(index, deep=True) == []


def check_regrown(index: Index) -> None:
    """Rebuild from the files alone, whose named parents are replaced ones, finds everything again."""
    rows = index.sessions()
    texts = [unpack_tokens(index.path_tokens(row.leaf))[: row.tokens] for row in rows]
    before = [list_checkpoints(index, text) for text in texts]
    index.transact(clear_tables)
    repair(index, deep=False, is_saving=False)
    for text, states in zip(texts, before, strict=True):
        check_content(index, text, checkpoints=states)
    assert verify_index(index) == []


def list_checkpoints(index: Index, ids: Sequence[int]) -> list[int]:
    return [ref.position for ref in index.match_prefix(ROOT, pack_tokens(ids), len(ids)).checkpoints]
