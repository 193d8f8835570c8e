"""Recorded requests of each client get right answers, and each turn starts from the end of the last one."""

import pytest

from support.pair.pair import Pair
from support.pair.recorded import CLIENTS, RecordedAnswer, count_reusable, read_client, send_turn


@pytest.mark.parametrize("client", CLIENTS)
def test_recorded_turns_are_answered_warm(client: str, agent_pair: Pair) -> None:
    recorded, answers = read_client(client), list[RecordedAnswer]()
    for turn in recorded["turns"]:
        call_id = next((answer.call_ids[0] for answer in reversed(answers) if answer.call_ids), "")
        answer = send_turn(agent_pair, recorded, turn, call_id)
        assert answer.reasoning == turn["reasoning"]
        assert answer.text == turn.get("text", "")
        assert answer.calls == [tuple(call) for call in turn.get("calls", [])]
        if answers:
            kept = count_reusable(answers, turn["goes_on_from"])
            assert answer.cached_tokens >= kept, f"{answer.cached_tokens} of {kept}: {agent_pair.requests()[:1]}"
        answers.append(answer)
        agent_pair.settle()
