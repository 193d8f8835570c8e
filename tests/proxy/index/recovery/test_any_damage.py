"""Property: after any damage to an index and its files, repair leaves both consistent, with true contents."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.index.damage import DAMAGES, A, IndexCorruptor, list_texts, repair_and_verify, save_conversations
from support.index.indexes import BUDGET, count_matched, make_home, save
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index, IndexReader
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.startup import repair_damage
from warmline_proxy.index.recovery.verify import verify_index


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = make_home(tmp_path_factory.mktemp("template") / "home")
    with Index(home, BUDGET) as index:
        save_conversations(index)
    return home


@settings(max_examples=60)
@given(damages=st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=6), seed=st.integers(0, 1 << 32))
def test_repair_after_any_damage_leaves_true_index(template: Home, damages: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        shutil.copytree(template.root, home.root)
        corruptor = IndexCorruptor(home, random.Random(seed))
        for damage in sorted(damages, key=lambda damage: damage == "overwrite_index"):
            getattr(corruptor, damage)()
        with IndexReader(template) as truth:
            known, checkpoints = list_texts(truth), truth.snapshot().checkpoints.values()
            states = {row.id: row.position for row in checkpoints}
            state_texts = {row.id: truth.path_tokens(row.segment)[: 4 * row.position] for row in checkpoints}
        with Index(home, BUDGET) as index:
            repair_damage(index)
            repair_and_verify(index)
            assert repair(index, deep=True, is_saving=False).did == []
            for segment, (root, text) in list_texts(index).items():
                assert known[segment] == (root, text)
                found = index.match_prefix(root, pack_tokens(text), len(text))
                assert found.tokens == len(text) and found.chain[-1].id == segment
            for row in index.snapshot().checkpoints.values():
                assert row.position == states[row.id]
                assert index.path_tokens(row.segment)[: 4 * row.position] == state_texts[row.id]
            save(index, [*A[:390], 1, 2, 3], checkpoints=[391])
            assert count_matched(index, [*A[:390], 1, 2, 3]) == 393
            assert verify_index(index, deep=True) == []
