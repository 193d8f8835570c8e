"""Messages of a failed start."""

import pytest

from warmline_backend.__main__ import format_load_failure


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("--model /nowhere: there is no such folder", "can't serve: --model /nowhere: there is no such folder"),
        ("the tokenizer can't be loaded", "can't serve /nowhere: the tokenizer can't be loaded"),
    ],
)
def test_load_failure_names_model_once(reason: str, message: str) -> None:
    assert format_load_failure("/nowhere", reason) == message
