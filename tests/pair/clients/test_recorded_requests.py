"""Recorded requests of each client get right answers, and each turn starts from the end of the last one."""

import pytest

from support.pair.pair import Pair
from support.pair.recorded import CLIENTS, RecordedAnswer, read_client, send_turn

GENERATION_PROMPT = 3  # tokens: whose turn it is, where the model's begins


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


def count_reusable(answers: list[RecordedAnswer], goes_on_from: str) -> int:
    """Count the tokens that the next turn may reuse, by its relation to the last one.

    - "answer": all that was said comes back and is shown: to the last token said, which has no row yet.
    - "request": the template leaves out the last reasoning: to the end of what was answered with it.
    - "first request": the user has spoken again, and the template leaves out all reasoning since the request before.
    """
    if goes_on_from == "answer":
        return answers[-1].prompt_tokens + answers[-1].answer_tokens - 1
    return (answers[-1] if goes_on_from == "request" else answers[0]).prompt_tokens - GENERATION_PROMPT
