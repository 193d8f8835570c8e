"""Budget of all bodies: who makes way for whom, and what is counted."""

import pytest

from warmline_proxy.errors import ClientError
from warmline_proxy.http.body_budget import IDLE_AFTER_S, BodyBudget, RequestBody


class Budget(BodyBudget):
    """Budget of 1000 bytes, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(1000, lambda: self.now)

    def receive(self, caller: str, size: int, *, whole: bool = False) -> RequestBody:
        body = self.open_body(caller)
        body.append(bytes(size), 0)
        if whole:
            body.take()
        return body

    def refuses(self, caller: str, size: int) -> bool:
        try:
            self.receive(caller, size)
        except ClientError as error:
            assert error.status == 503 and error.retry_after_s
            return True
        return False


def test_bodies_count_until_they_are_released() -> None:
    budget = Budget()
    one, other = budget.receive("a", 300, whole=True), budget.receive("b", 600)
    assert budget.counted_bytes == 900
    for body in (one, one, other):
        body.release()
    assert budget.counted_bytes == 0


def test_parsed_values_count_too() -> None:
    budget = Budget()
    body = budget.open_body("a")
    body.append(b"[]", 700)
    assert body.take() == b"[]"
    assert budget.counted_bytes == 702 and budget.refuses("a", 60)


def test_small_body_of_the_same_caller_displaces_the_largest_unfinished_one() -> None:
    budget = Budget()
    small, large = budget.receive("a", 150), budget.receive("a", 600)
    assert not budget.refuses("a", 50)
    assert large.is_displaced and not small.is_displaced and large.size == 0
    with pytest.raises(ClientError, match="no memory"):
        large.take()


def test_larger_body_of_the_same_caller_is_refused_unless_others_are_idle() -> None:
    budget = Budget()
    first = budget.receive("a", 400)
    assert budget.refuses("a", 500) and not first.is_displaced
    budget.now = IDLE_AFTER_S
    assert not budget.refuses("a", 500) and first.is_displaced


def test_body_that_progresses_is_not_idle() -> None:
    budget = Budget()
    first = budget.receive("a", 399)
    budget.now = IDLE_AFTER_S
    first.append(b"x", 0)
    assert budget.refuses("a", 500) and not first.is_displaced


def test_caller_with_most_makes_way_for_others() -> None:
    budget = Budget()
    greedy = [budget.receive("greedy", 240) for _ in range(3)]
    modest = budget.receive("modest", 200)
    assert not budget.refuses("newcomer", 200)
    assert sum(body.is_displaced for body in greedy) == 1 and not modest.is_displaced
    assert not budget.refuses("newcomer", 200)
    assert budget.refuses("newcomer", 300)  # it has more than the others by now


def test_whole_bodies_are_not_displaced() -> None:
    budget = Budget()
    whole = budget.receive("a", 700, whole=True)
    assert budget.refuses("b", 400) and not whole.is_displaced
    assert not budget.refuses("b", 300)


def test_one_caller_leaves_a_share_to_others() -> None:
    budget = Budget()
    for _ in range(7):
        budget.receive("a", 100, whole=True)
    assert budget.refuses("a", 100)
    assert not budget.refuses("b", 250)


def test_reader_of_displaced_body_is_woken() -> None:
    budget, woken = Budget(), list[str]()
    body = budget.receive("a", 700)
    body.on_displaced = lambda: woken.append("a")
    budget.receive("b", 400)
    assert woken == ["a"]
    with pytest.raises(ClientError):
        body.append(b"x", 0)
    assert budget.counted_bytes == 400


def test_body_that_can_never_fit_is_not_told_to_try_again() -> None:
    budget = Budget()
    body = budget.receive("a", 700, whole=True)
    with pytest.raises(ClientError, match=r"^413: .* 750 bytes"):
        body.count(51)
    body.count(50)
    assert budget.counted_bytes == 750


def test_discounted_bytes_are_free_again() -> None:
    budget = Budget()
    body = budget.receive("a", 100, whole=True)
    body.count(600)
    assert budget.refuses("a", 100)
    body.discount(600)
    assert budget.counted_bytes == 100 and not budget.refuses("a", 600)
    body.release()
    body.discount(100)
    assert budget.counted_bytes == 600, "nothing counts twice"
