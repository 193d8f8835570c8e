"""Status of a request: stages, branches, and events after the end of the response; the load that requests are."""

from typing import Any, cast

from support.proxy.harness import on_loop
from warmline_common.protocol import waits
from warmline_proxy.estimate.costs import EngineLoad, PrefillLeft
from warmline_proxy.planner import RequestPlan
from warmline_proxy.request.deadlines import RequestTimeouts
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import STAGES, Request, RequestStatus
from warmline_proxy.request_log import RequestLog


def make_request() -> Request:
    return Request(RequestLog("chat"), cast(Any, None), RequestTimeouts())


@on_loop
async def test_status_words_are_in_order_of_the_stages() -> None:
    words = ["arriving", "waiting", "restoring", "prefilling", "answering", "ending", "settling"]
    assert [status.value for status in STAGES] == words


@on_loop
async def test_status_after_response_depends_on_release_alone() -> None:
    request = make_request()
    request.advance(RequestStatus.PREFILLING)
    request.record_first_token()
    assert request.status is RequestStatus.ANSWERING
    request.mark_response_done()
    assert request.status is RequestStatus.ENDING
    request.advance(RequestStatus.PREFILLING)
    assert request.status is RequestStatus.ENDING, "a late event of the engine changes nothing"
    request.mark_released()
    assert request.status is RequestStatus.SAVING


@on_loop
async def test_status_is_saving_where_the_engine_was_released_first() -> None:
    request = make_request()
    request.mark_released()
    assert request.status is RequestStatus.ARRIVING
    request.mark_response_done()
    assert request.status is RequestStatus.SAVING


@on_loop
async def test_status_of_several_choices_is_that_of_the_furthest() -> None:
    request, first, second = make_request(), make_request(), make_request()
    request.branches += [first, second]
    second.advance(RequestStatus.RESTORING)
    assert request.status is RequestStatus.RESTORING
    first.record_first_token()
    first.mark_response_done()
    assert request.status is RequestStatus.ANSWERING, "until the response of all is over"
    request.mark_response_done()
    assert request.status is RequestStatus.ENDING


@on_loop
async def test_reset_returns_to_arriving_and_forgets_the_first_token() -> None:
    request = make_request()
    request.record_first_token()
    request.reset()
    assert request.status is RequestStatus.ARRIVING and not request.log.ttft_s


@on_loop
async def test_load_is_that_of_planned_requests() -> None:
    registry = RequestRegistry()
    asking, planned, arriving, answering, left = (registry.add(make_request()) for _ in range(5))
    for request, ttft_s in ((planned, 0.0), (answering, 3.0), (left, 0.0)):
        request.log.plan, request.log.prompt_tokens, request.log.ttft_s = RequestPlan("resident", 200), 1_000, ttft_s
    planned.prefilled_tokens = 600
    left.mark_response_done()
    asking.log.add_waits({waits.PLACE: 2.0, waits.PROMPT: 1.0})
    load = registry.describe_load(asking)
    assert load == EngineLoad(2.0, [PrefillLeft(planned.log.id, 600, 999)], decoding_count=1)
    assert arriving.log.plan is None and registry.describe_load(planned).prefills == []
