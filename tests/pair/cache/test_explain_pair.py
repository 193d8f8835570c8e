"""`explain` names each kind of client change with token and message."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from support.pair.pair import FolderOf, Pair
from warmline_cachectl.cli import app
from warmline_cachectl.views import explain as sides
from warmline_common.protocol.messages import encode
from warmline_common.protocol.tokens import count_common_tokens
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.retention.purge import PurgeRequest

LOOK, WALK = (
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": {"type": "object"}}}
    for name in ("look", "walk")
)
SYSTEM = "You watch a harbour, and write down which ships come and go, in order of their size and of their flags."
QUESTIONS = ("Which ship came first, and from where did it come?", "Whose is it?", "And the one after it, what was it?")
OTHER_KEY, KEY = "another", "someone"

Body = dict[str, Any]


@pytest.fixture(scope="module")
def pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Pair with a llama whose template renders tools and reasoning."""
    with Pair(tmp_path_factory.mktemp("explained"), tiny_folder("llama", tools=True)) as pair:
        yield pair


def make_body(system: str = SYSTEM, tools: list[Any] | None = None, **changes: str) -> Body:
    """Make a conversation with reasoning; `changes` replace a message by its number: m4="..."."""
    texts = [system, QUESTIONS[0], "The Anna, from Bergen.", QUESTIONS[1], "A widow's in Stavanger.", QUESTIONS[2]]
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [
        {"role": role, "content": changes.get(f"m{number}", text)}
        for number, (role, text) in enumerate(zip(roles, texts, strict=True), 1)
    ]
    return {"model": "any/name", "messages": messages, "max_tokens": 3, **({"tools": tools} if tools else {})}


def explain_request(pair: Pair, sent: Body, **headers: str) -> Any:
    """Send a request; the reply of `explain` for it."""
    reply = pair.post("/v1/chat/completions", sent, **headers)
    assert reply.status == 200, reply.raw
    pair.settle()
    return pair.as_owner("GET", f"{pair.url}/warmline/explain?request={reply.headers['X-Warmline-Request']}").json


def count_common_prefix(pair: Pair, before: Body, after: Body) -> int:
    tokens = [pair.render_prompt(each["messages"], tools=each.get("tools")).tokens for each in (before, after)]
    return count_common_tokens(*tokens)


def make_clock_text(at: str) -> str:
    return f"The clock shows {at}.\n{SYSTEM}"


CHANGES = {
    "timestamp": (make_body(make_clock_text("14:22:33")), make_body(make_clock_text("14:25:01")), (1, "system")),
    "date": (make_body(make_clock_text("Nov 28, 2026")), make_body(make_clock_text("Nov 29, 2026")), (1, "system")),
    "random-id": (
        make_body(make_clock_text("req_8Fk2m1Qx7Lp0Zt5a")),
        make_body(make_clock_text("req_9Ak2m1Qx7Lp0Zt5b")),
        (1, "system"),
    ),
    "tools-changed": (
        make_body("Changed tools.", [LOOK, WALK]),
        make_body(
            "Changed tools.", [{"type": "function", "function": {**LOOK["function"], "description": "Sees."}}, WALK]
        ),
        (1, "system"),
    ),
    "tool-order": (make_body("Moved tools.", [LOOK, WALK]), make_body("Moved tools.", [WALK, LOOK]), (1, "system")),
    "system-edited": (make_body(f"Edited. {SYSTEM}"), make_body(f"Edited. {SYSTEM[:40]} and be brief."), (1, "system")),
    "message-edited": (
        make_body("A."),
        make_body("A.", m2="Which ship left last, and where to did it go?"),
        (2, "user"),
    ),
    "answer-changed": (make_body("B."), make_body("B.", m5="A widow's, I think, but who knows?"), (5, "assistant")),
    "other-message": (make_body("C."), make_body("C.", m6="And now write a poem about all of this."), (6, "user")),
    "whitespace": (make_body("D."), make_body("D.", m2=QUESTIONS[0].replace(" ", "\n")), (2, "user")),
}


@pytest.mark.parametrize("cause", CHANGES)
def test_explain_names_each_client_change(pair: Pair, cause: str) -> None:
    before, after, (message, role) = CHANGES[cause]
    explain_request(pair, before)
    explanation = explain_request(pair, after)
    where = explanation["where"]
    assert explanation["verdict"]["cause"] == cause, explanation
    assert (where["message"], where["role"]) == (message, role)
    assert where["token"] == count_common_prefix(pair, before, after)
    texts = [side["text"] for side in (explanation["known"], explanation["prompt"])]
    assert texts[0] != texts[1] and texts[0][:8] == texts[1][:8]
    assert explanation["now"]["branch"] and explanation["now"]["tokens"] > where["token"]


def test_explain_names_removed_messages(pair: Pair) -> None:
    before, after = make_body("E."), make_body("E.")
    del after["messages"][1:3]
    explain_request(pair, before)
    explanation = explain_request(pair, after)
    assert (explanation["verdict"]["cause"], explanation["where"]["message"]) == ("truncated", 2)


def make_call_body(system: str, **answer: str) -> Body:
    """Make a conversation up to a tool's result."""
    talk = make_body(system, [LOOK])
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calling = {"role": "assistant", "content": "The Anna.", "tool_calls": [call], **answer}
    talk["messages"][2:] = [calling, {"role": "tool", "tool_call_id": "1", "content": "The Anna is there."}]
    return talk


def test_explain_names_missing_reasoning(pair: Pair) -> None:
    explain_request(pair, make_call_body("F.", reasoning_content="Bergen is where she is from."))
    explanation = explain_request(pair, make_call_body("F."))
    assert (explanation["verdict"]["cause"], explanation["where"]["message"]) == ("reasoning-dropped", 3)


def test_explain_names_template_that_drops_reasoning(pair: Pair) -> None:
    talk = make_call_body("G.", reasoning_content="Bergen is where she is from.")
    explain_request(pair, talk)
    talk["messages"] += [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "Good."}]
    explanation = explain_request(pair, talk)
    assert (explanation["verdict"]["cause"], explanation["where"]["message"]) == ("reasoning-left-out", 3)


def test_cachectl_shows_both_texts_with_and_without_proxy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    explain_request(pair, make_body(make_clock_text("14:30:00")))
    explanation = explain_request(pair, make_body(make_clock_text("15:00:00")))
    first = explanation["request"]["id"]
    by_proxy = pair.cachectl("explain", first)
    monkeypatch.setattr("warmline_cachectl.client.find_lock_holder", lambda _: "")
    assert pair.cachectl("explain", first[:8]) == by_proxy == explanation
    assert pair.cachectl("explain", "nobody", code=1) is None
    monkeypatch.setattr(sides, "make_console", lambda: Console(width=80))
    text = CliRunner().invoke(app, ["explain", first, "--home", str(pair.home.root)]).stdout
    assert "timestamp: A time in the prompt" in text and "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}15" in text


def test_explain_reports_later_warm_requests(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = explain_request(pair, make_body("I came first."))["request"]["id"]
    warm = [explain_request(pair, make_body("I came first."))["request"]["id"] for _ in range(2)]
    by_proxy = pair.cachectl("explain")
    assert by_proxy["request"]["id"] == cold
    assert (by_proxy["since"]["warm"], by_proxy["since"]["last"]) == (2, warm[-1])
    assert pair.cachectl("explain", cold)["since"] is None
    monkeypatch.setattr("warmline_cachectl.client.find_lock_holder", lambda _: "")
    assert pair.cachectl("explain") == by_proxy
    text = CliRunner().invoke(app, ["explain", "--home", str(pair.home.root)]).stdout
    assert text.startswith(f"The last one that was not warm; 2 requests since then were, the last of them {warm[-1]} (")


def test_explain_compares_two_conversations(pair: Pair) -> None:
    before, after = (
        explain_request(pair, make_body("H.")),
        explain_request(pair, make_body("H.", m4="Where is it now?")),
    )
    sessions = [each["now"]["session"] for each in (before, after)]
    found = pair.cachectl("diff", *sessions)
    assert found["common"] == after["where"]["token"] and found["where"]["message"] == 4
    assert "Whose is it?" in found["side_a"]["text"] and "Where is it now?" in found["side_b"]["text"]
    assert pair.cachectl("diff", sessions[0], sessions[0])["where"] is None


def test_purge_deletes_prompt_texts(pair: Pair) -> None:
    explain_request(pair, make_body(make_clock_text("16:22:33 SECRET")))
    explanation = explain_request(pair, make_body(make_clock_text("16:25:01 SECRET")))
    assert "SECRET" in explanation["prompt"]["text"]
    purge = encode(PurgeRequest(session=explanation["now"]["session"]))
    pair.as_owner("POST", f"{pair.url}/warmline/purge", purge)
    records = pair.as_owner("GET", f"{pair.url}/warmline/requests").json["requests"]
    assert records and all(record["parting"] is None for record in records)
    assert "SECRET" not in json.dumps(records)


def test_explain_names_prompt_of_another_key(pair: Pair) -> None:
    """The last test: from here on the pair wants a key."""
    keys = {name: keys_file.add_key(pair.home, name).key for name in (KEY, OTHER_KEY)}
    explain_request(pair, make_body(), Authorization=f"Bearer {keys[KEY]}")
    explanation = explain_request(pair, make_body(), Authorization=f"Bearer {keys[OTHER_KEY]}")
    assert (explanation["verdict"]["cause"], explanation["request"]["key"]) == ("other-key", OTHER_KEY)
    assert explanation["verdict"]["detail"].endswith(f" stored for the key {KEY}")
    named = {each["key"] for each in pair.cachectl("ls")["sessions"]}
    assert named == {"no key", KEY, OTHER_KEY}
    left = pair.cachectl("key", "remove", KEY)["stored"]
    assert [each["root"] for each in pair.cachectl("tree")["trees"] if each["key"] == "a removed key"] == left
    fresh = keys_file.add_key(pair.home, KEY).key
    explain_request(pair, make_body("C."), Authorization=f"Bearer {fresh}")
    assert pair.cachectl("purge", "--key", f"a removed key {left[0][:8]}", "--yes")["sessions"]
    assert {each["key"] for each in pair.cachectl("ls")["sessions"]} == named, "the new one's, which is called so too"
    assert left[0] not in {each["root"] for each in pair.cachectl("tree")["trees"]}
