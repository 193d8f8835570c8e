"""Requests that refer to stored responses and items: the same prompt as of the conversation sent whole."""

import json
from collections.abc import Collection
from functools import partial
from typing import Any

import pytest

from support.proxy.calls import read_call
from support.proxy.responses import (
    AGENTS,
    LOOK,
    PATCH,
    make_call,
    make_chunks,
    make_delta,
    make_message,
    make_result,
    make_thinking,
)
from warmline_common.protocol.messages import ErrorReply, decode, encode
from warmline_proxy.api.base import ApiCall, ResponseStart
from warmline_proxy.api.responses import history
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.api.responses.history import (
    AnsweredRequest,
    StoredItem,
    StoredResponse,
    build_item_page,
    find_answer_id,
    normalize_input,
    parse_response,
)
from warmline_proxy.errors import ClientError, bad_request, request_cancelled

THINK = make_delta(reasoning_content="Hm.")
SAY = make_delta(content="Paris.")
CALLS = make_delta(tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "look", "arguments": '{"a": 1}'}}])
CUSTOM = make_delta(
    tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "patch", "arguments": '{"input": "x"}'}}]
)
TOOLS = [LOOK, PATCH, AGENTS]


class MemoryHistory:
    """Stored responses in memory, by answer id."""

    def __init__(self) -> None:
        self.is_off = False
        self.bytes_max = 10_000
        self.stored: dict[str, StoredResponse] = {}
        self.item_ids: dict[str, list[str]] = {}
        self.running: dict[str, bool] = {}
        self.lookups: list[str] = []
        self.counted: list[str] = []

    @property
    def response_bytes_max(self) -> int:
        return 0 if self.is_off else self.bytes_max

    def store(self, name: str, answered: AnsweredRequest) -> bool:
        if len(answered.encode()) > self.bytes_max:
            return False
        self.stored[name] = parse_response(answered.encode())
        self.item_ids[name] = answered.item_ids
        return True

    async def find_response(self, answer_id: str) -> StoredResponse | None:
        self.lookups.append(answer_id)
        return self.stored.get(answer_id)

    async def find_items(self, item_id: str, wanted_ids: Collection[str]) -> dict[str, StoredItem]:
        self.lookups.append(item_id)
        holders = [name for name in self.stored if item_id in self.item_ids[name]]
        items = self.stored[holders[-1]].items if holders else []
        return {item.id: item for item in items if item.id in wanted_ids}

    def find_running(self, answer_id: str) -> bool | None:
        return self.running.get(answer_id)

    def count(self, item: StoredItem) -> None:
        self.counted.append(item.id)


class Dialogue:
    """Requests of one client, whose responses are stored as their own JSON."""

    def __init__(self) -> None:
        self.history = MemoryHistory()

    def read(self, value: object, **fields: Any) -> ApiCall:
        body = {"model": "m", "input": value, "tools": TOOLS, **fields}
        return read_call(ResponsesApi(self.history), json.dumps(body).encode(), {})

    def read_messages(self, value: object, **fields: Any) -> Any:
        return self.read(value, **fields).fields["messages"]

    def answer(self, name: str, value: object, *deltas: dict[str, Any], finish: str = "stop", **fields: Any) -> Any:
        """Answer a request; the response as the client gets it."""
        call = self.read(value, **fields)
        encoder = call.api.create_encoder(call, self.make_start(name))
        for chunk in make_chunks(*deltas, finish=finish):
            encoder.encode_chunk({}, encode(chunk))
        return json.loads(encoder.encode_json())

    def make_start(self, name: str) -> ResponseStart:
        return ResponseStart(name, "m", 3, 0, partial(self.history.store, name))

    def catch_refusal(self, value: object, **fields: Any) -> tuple[int, Any]:
        with pytest.raises(ClientError) as failure:
            self.read(value, **fields)
        return failure.value.status, decode(failure.value.body, ErrorReply).error


def read_response(dialogue: Dialogue, name: str) -> Any:
    return json.loads(bytes(dialogue.history.stored[name].response))


def make_references(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


RESULT, QUESTION = make_result("a cat"), make_message("user", "And now?")
FIRST_INPUTS: list[Any] = [
    "Hi.",
    [{"role": "user", "content": "Hi."}],
    [make_message("developer", "Be brief."), make_message("user", "Hi.")],
    [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": None}],
    [make_message("user", "Hi."), make_thinking("Hm."), make_call("look"), make_result("a dog"), QUESTION],
    [make_message("user", "Hi."), make_thinking("Hm.", id="rs_68a_0"), make_message("assistant", "No.", "output_text")],
    [{"type": "web_search_call", "id": "ws_1"}, {"type": "additional_tools", "tools": []}, make_message("user", "Hi.")],
]
ANSWERS = {
    "text": (SAY,),
    "thought and text": (THINK, SAY),
    "thought, text and call": (THINK, SAY, CALLS),
    "custom call": (CUSTOM,),
    "nothing": (),
}


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("first", FIRST_INPUTS, ids=range(len(FIRST_INPUTS)))
def test_turn_by_reference_has_prompt_of_whole_conversation(first: Any, answer: str, summary: str | None) -> None:
    dialogue, kind = Dialogue(), "custom_tool_call_output" if answer == "custom call" else "function_call_output"
    response = dialogue.answer("r-1", first, *ANSWERS[answer], reasoning={"summary": summary})
    given = [{"role": "user", "content": first}] if isinstance(first, str) else first
    new = [{**RESULT, "type": kind}] if "call" in answer else [QUESTION]
    whole = dialogue.read_messages([*given, *response["output"], *new])
    assert dialogue.read_messages(new, previous_response_id=response["id"]) == whole
    assert dialogue.read_messages([*given, *make_references(response["output"]), *new]) == whole


def test_several_turns_by_reference() -> None:
    """The third turn refers to the first two answers, one by one as to the previous response."""
    dialogue = Dialogue()
    first = dialogue.answer("r-1", "Hi.", THINK, CALLS)
    second = dialogue.answer("r-2", [RESULT], THINK, SAY, previous_response_id=first["id"])
    whole = [{"role": "user", "content": "Hi."}, *first["output"], RESULT, *second["output"], QUESTION]
    expected = dialogue.read_messages(whole)
    assert dialogue.read_messages([QUESTION], previous_response_id=second["id"]) == expected
    references = [whole[0], *make_references(first["output"]), RESULT, *make_references(second["output"]), QUESTION]
    dialogue.history.lookups.clear()
    assert dialogue.read_messages(references) == expected
    assert dialogue.history.lookups == ["rs_r-1_0"], "the newest response of the conversation has all of its items"
    del dialogue.history.stored["r-1"]
    assert dialogue.read_messages(references) == expected, "also those of an answer that is no longer stored"


def test_items_that_newest_response_lacks_are_found_in_an_earlier_one() -> None:
    dialogue = Dialogue()
    first = dialogue.answer("r-1", "Hi.", THINK, SAY)
    dialogue.answer("r-2", [first["output"][1], QUESTION], SAY)
    dialogue.answer("r-3", [*first["output"], QUESTION], SAY)
    dialogue.answer("r-4", [first["output"][1], QUESTION], SAY)
    del dialogue.history.stored["r-1"]
    messages = dialogue.read_messages(make_references(first["output"]))
    assert messages == [{"role": "assistant", "content": "Paris.", "reasoning_content": "Hm."}]


def test_input_items_can_be_referred_to() -> None:
    dialogue = Dialogue()
    dialogue.answer("r-1", [{"role": "user", "content": "Hi."}, make_call("look"), RESULT], SAY)
    ids = [item.id for item in dialogue.history.stored["r-1"].input]
    assert ids == ["msg_r-1_i0", "fc_r-1_i1", "fco_r-1_i2"]
    assert dialogue.read_messages([{"type": "item_reference", "id": ids[0]}]) == [{"role": "user", "content": "Hi."}]


def test_items_with_ids_of_other_servers_can_be_referred_to() -> None:
    dialogue = Dialogue()
    dialogue.answer("r-1", [{"role": "user", "content": "Hi.", "id": "msg_68a0c1d2"}], SAY)
    assert dialogue.read_messages(make_references([{"id": "msg_68a0c1d2"}])) == [{"role": "user", "content": "Hi."}]


def test_instructions_and_tools_are_those_of_the_new_request() -> None:
    dialogue = Dialogue()
    first = dialogue.answer("r-1", "Hi.", SAY, instructions="Be brief.")
    call = dialogue.read("And now?", previous_response_id=first["id"], instructions="Be loud.", tools=[PATCH])
    assert [message["content"] for message in call.fields["messages"]] == ["Be loud.", "Hi.", "Paris.", "And now?"]
    assert [tool["function"]["name"] for tool in call.fields["tools"]] == ["patch"]
    assert dialogue.read_messages("And now?", previous_response_id=first["id"])[0]["role"] == "user"


@pytest.mark.parametrize("form", [{}, {"type": None}, {"type": None, "role": None}, {"type": "item_reference"}])
def test_type_of_a_reference_may_be_left_out(form: dict[str, Any]) -> None:
    dialogue = Dialogue()
    (item,) = dialogue.answer("r-1", "Hi.", SAY)["output"]
    assert dialogue.read_messages([{**form, "id": item["id"]}, QUESTION]) == dialogue.read_messages([item, QUESTION])
    status, error = dialogue.catch_refusal([{**form, "id": "msg_r-9_0"}])
    assert (status, error.code) == (404, "item_not_found")
    status, error = dialogue.catch_refusal([{**form, "id": 5}])
    assert (status, error.param) == (400, "input[0].id")


def test_items_with_other_fields_than_an_id_are_no_references() -> None:
    dialogue = Dialogue()
    (item,) = dialogue.answer("r-1", "Hi.", SAY)["output"]
    message = {"id": item["id"], "role": "user", "content": "Mine."}
    assert dialogue.read_messages([message]) == [{"role": "user", "content": "Mine."}]
    for other in ({}, {"id": item["id"], "content": "Mine."}, {"id": item["id"], "status": "completed"}):
        status, error = dialogue.catch_refusal([other])
        assert (status, error.param) == (400, "input[0].role")


def test_items_that_no_model_reads_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue, decode_item, decoded = Dialogue(), StoredItem.decode, list[str]()

    def record(item: StoredItem) -> dict[str, Any]:
        decoded.append(item.type)
        return decode_item(item)

    monkeypatch.setattr(StoredItem, "decode", record)
    first = dialogue.answer("r-1", [{"type": "web_search_call", "id": "ws_1"}, QUESTION], SAY)
    second = dialogue.answer("r-2", "And?", SAY, previous_response_id=first["id"])
    dialogue.answer("r-3", make_references(second["output"]), SAY)
    assert decoded == ["message"] * 3
    assert [item.id for item in dialogue.history.stored["r-2"].input][:2] == ["ws_1", "msg_r-1_i1"]


def test_too_large_a_response_says_that_it_is_not_stored() -> None:
    """Before it begins where the input alone is too large, else at its end."""
    dialogue = Dialogue()
    first = dialogue.answer("r-1", "x" * 6000, SAY)
    assert first["store"] is True
    for name, fields in (
        ("r-2", {"value": "x" * 10_000}),
        ("r-3", {"value": "x" * 5000, "previous_response_id": "r-1"}),
    ):
        call = dialogue.read(**fields)
        assert call.api_options.stored_input is None and call.api_options.echo["store"] is False, name
    call = dialogue.read("Hi.", stream=True)
    encoder = call.api.create_encoder(call, dialogue.make_start("r-4"))
    events = encoder.encode_chunk({}, encode(make_delta(content="x" * 10_000))) + encoder.encode_done()
    responses = [json.loads(line[6:]).get("response", {}) for line in events.splitlines() if line[:6] == b"data: "]
    assert [each["store"] for each in responses if each] == [True, True, False]
    assert dialogue.answer("r-5", "Hi.", make_delta(content="x" * 10_000))["store"] is False
    assert dialogue.history.stored.keys() == {"r-1"}


def test_response_says_whether_it_is_stored() -> None:
    dialogue = Dialogue()
    first = dialogue.answer("r-1", "Hi.", SAY)
    second = dialogue.answer("r-2", "And now?", SAY, previous_response_id=first["id"], store=False)
    assert (first["store"], first["previous_response_id"]) == (True, None)
    assert (second["store"], second["previous_response_id"]) == (False, "resp_r-1")
    assert dialogue.history.stored.keys() == {"r-1"} and read_response(dialogue, "r-1") == first


def test_incomplete_response_is_stored_and_continued() -> None:
    dialogue = Dialogue()
    first = dialogue.answer("r-1", "Hi.", SAY, finish="length")
    assert first["status"] == "incomplete" and read_response(dialogue, "r-1") == first
    assert len(dialogue.read_messages("Go on.", previous_response_id=first["id"])) == 3


def test_failed_stream_is_stored_unless_it_was_cancelled() -> None:
    for name, error, is_stored in (("a", bad_request("No."), True), ("b", request_cancelled("Off."), False)):
        dialogue = Dialogue()
        call = dialogue.read("Hi.", stream=True)
        encoder = call.api.create_encoder(call, dialogue.make_start(name))
        encoder.encode_chunk({}, encode(SAY))
        encoder.encode_stream_error(error)
        assert (name in dialogue.history.stored) == is_stored
        assert not is_stored or read_response(dialogue, name)["status"] == "failed"


# ---- refusals


def test_unknown_references_are_refused_with_advice() -> None:
    dialogue = Dialogue()
    dialogue.answer("r-1", "Hi.", SAY, store=False)
    status, error = dialogue.catch_refusal("Hi.", previous_response_id="resp_r-1")
    assert (status, error.code, error.param) == (400, "previous_response_not_found", "previous_response_id")
    assert "'resp_r-1' not found" in error.message and "'store: false'" in error.message and "'input'" in error.message
    for item_id in ("msg_r-1_0", "rs_68a", "", "x" * 500, "msg_\n_0"):
        status, error = dialogue.catch_refusal([QUESTION, {"type": "item_reference", "id": item_id}])
        assert (status, error.param) == (404, "input")
        assert "input[1]" in error.message and "'store: false'" in error.message and len(error.message) < 500
    status, error = dialogue.catch_refusal([{"type": "item_reference"}])
    assert (status, error.param) == (400, "input[0].id")


@pytest.mark.parametrize(("is_stored", "word"), [(True, "wait for its end"), (False, "will not be stored")])
def test_references_to_a_running_response_say_so(is_stored: bool, word: str) -> None:
    dialogue = Dialogue()
    dialogue.history.running["r-1"] = is_stored
    for fields in ({"previous_response_id": "resp_r-1"}, {"value": make_references([{"id": "msg_r-1_0"}])}):
        status, error = dialogue.catch_refusal(**{"value": "Hi.", **fields})
        assert (status, error.code) == (409, "response_in_progress")
        assert "'resp_r-1' is still being answered" in error.message and word in error.message
        assert "not found" not in error.message


def test_refusals_say_that_storing_is_off() -> None:
    dialogue = Dialogue()
    dialogue.history.is_off = True
    for fields in ({"previous_response_id": "resp_r-1"}, {"value": make_references([{"id": "msg_r-1_0"}])}):
        _, error = dialogue.catch_refusal(**{"value": "Hi.", **fields})
        assert "stores no responses" in error.message and "'store: false'" in error.message
    assert dialogue.answer("r-1", "Hi.", SAY)["store"] is False and not dialogue.history.stored


def test_errors_of_new_items_name_their_own_place() -> None:
    dialogue = Dialogue()
    first = dialogue.answer("r-1", [QUESTION, QUESTION], SAY)
    _, error = dialogue.catch_refusal([QUESTION, {"type": "sound"}], previous_response_id=first["id"])
    assert error.param == "input[1]"


def test_repeated_references_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BODY_BYTES_MAX", 1000)
    dialogue = Dialogue()
    first = dialogue.answer("r-1", "Hi.", make_delta(content="x" * 100))
    assert dialogue.read_messages(make_references(first["output"] * 2))
    status, error = dialogue.catch_refusal(make_references(first["output"] * 10))
    assert status == 413 and "refers to" in error.message
    assert dialogue.history.counted[:2] == [first["output"][0]["id"]] * 2, "each use counts"


# ---- ids and pages


@pytest.mark.parametrize(
    ("item_id", "answer_id"),
    [
        ("msg_abc_0", "abc"),
        ("rs_a_b.c-1_12", "a_b.c-1"),
        ("fco_abc_i3", "abc"),
        ("msg_abc_i3_0", "abc_i3"),
        ("msg_68a0c1d2", ""),
        ("msg_", ""),
        ("", ""),
    ],
)
def test_answer_id_of_item_id(item_id: str, answer_id: str) -> None:
    assert find_answer_id(item_id) == answer_id


def test_input_items_are_listed_as_openai_lists_them() -> None:
    texts = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "id": None}]
    user, assistant, empty = normalize_input(texts, "r")
    assert user["content"] == [{"type": "input_text", "text": "Hi."}] and user["type"] == "message"
    assert assistant["content"] == [{"type": "output_text", "text": "Yes?", "annotations": []}]
    assert empty["content"] == [] and [each["id"] for each in (user, assistant, empty)] == [
        "msg_r_i0",
        "msg_r_i1",
        "msg_r_i2",
    ]
    own = {"type": "reasoning", "id": "rs_1", "summary": []}
    assert normalize_input([own], "r") == [own]


def make_items(*ids: str) -> list[StoredItem]:
    """Items as they are read again, of the input of answer r."""
    items = [{"type": "message", "id": each, "content": str(at)} for at, each in enumerate(ids)]
    return parse_response(AnsweredRequest({"id": "resp_r", "output": []}, list(items)).encode()).input


def list_page(items: list[StoredItem], limit: int, ascending: bool, after: str) -> Any:
    return json.loads(encode(build_item_page(items, limit, ascending, after)))


def list_page_ids(items: list[StoredItem], limit: int, ascending: bool, after: str) -> list[str]:
    return [item["id"] for item in list_page(items, limit, ascending, after)["data"]]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize(
    "ids", ["abc", "aab", "abab", "aaaa", "abcabca", ["msg_r_i1", "a", "a"], ["a", "a", "msg_r_i1"]]
)
def test_pages_end_and_have_each_item_once_where_ids_repeat(ids: list[str], ascending: bool, limit: int) -> None:
    items, contents, after = make_items(*ids), list[str](), ""
    for _ in range(len(ids)):
        page = list_page(items, limit, ascending, after)
        contents += [item["content"] for item in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    places = [str(at) for at in range(len(ids))]
    assert contents == (places if ascending else places[::-1]) and not page["has_more"]
    listed = [item.id for item in items]
    assert len(set(listed)) == len(ids) and listed[: len(set(ids))].count(ids[0]) == 1
    assert all(listed[ids.index(each)] == each for each in ids), "the first one keeps its id"


def test_items_of_a_repeated_id_are_all_rendered_and_referred_to_as_listed() -> None:
    dialogue = Dialogue()
    first = dialogue.answer("r-1", "Hi.", SAY)
    given = [
        *make_references(first["output"] * 2),
        {"role": "user", "content": "One", "id": "m"},
        QUESTION | {"id": "m"},
    ]
    second = dialogue.answer("r-2", given, SAY)
    whole = dialogue.read_messages([*first["output"] * 2, *given[2:], *second["output"], QUESTION])
    assert dialogue.read_messages([QUESTION], previous_response_id=second["id"]) == whole
    ids = [item.id for item in dialogue.history.stored["r-2"].input]
    assert ids == ["msg_r-1_0", "msg_r-2_i1", "m", "msg_r-2_i3"]
    assert dialogue.read_messages(make_references([{"id": "msg_r-2_i3"}])) == dialogue.read_messages([QUESTION])


def test_pages_of_items() -> None:
    items = make_items(*(f"i{number}" for number in range(5)))
    page = build_item_page(items, 2, False, "")
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", "i4", "i3", True)
    assert list_page_ids(items, 2, False, "i3") == ["i2", "i1"]
    assert build_item_page(items, 2, True, "i2") == {
        "object": "list",
        "data": [item.text for item in items[3:]],
        "first_id": "i3",
        "last_id": "i4",
        "has_more": False,
    }
    assert build_item_page([], 2, True, "")["first_id"] is None
    with pytest.raises(ClientError, match="no item"):
        build_item_page(items, 2, True, "i9")
