"""Volatile text in prompt heads: found, described, and stabilized."""

import msgspec
import pytest

from warmline_proxy.explain.prompt_head import (
    RULES,
    TOOL_ORDER,
    TOOLS_BYTES_MAX,
    PromptHead,
    PromptHeadCache,
    describe_changes,
    extract_head,
    stabilize_fields,
)
from warmline_proxy.explain.volatile import (
    BILLING,
    DATES,
    IDS,
    TEXT_CHARS_MAX,
    TIMES,
    find_volatile_spans,
    stabilize_text,
)

UUID = "3f2b8c1e-9a4d-4c7e-8f10-2b6d5e7a9c33"


def make_tool(name: str, **parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("text", "description", "stabilized"),
    [
        ("now 2026-11-28T14:22:33Z.", "a time", "now 2026-11-28 [time]."),
        ("now 2026-11-28 14:22:33.123+01:00,", "a time", "now 2026-11-28 [time],"),
        ("it is 14:22:33 here", "a time of day", "it is [time] here"),
        ("it is 9:05 PM here", "a time of day", "it is [time] here"),
        ("started 1795875753.25 s", "a Unix time", "started [time] s"),
        ("Today is 2026-11-28.", "a date", "Today is [date]."),
        ("Saturday, November 28, 2026", "a date", "Saturday, [date]"),
        ("on 28 Nov 2026", "a date", "on [date]"),
        ("on 11/28/2026", "a date", "on [date]"),
        (f"session {UUID} open", "a UUID", "session [id] open"),
        ("commit 9fceb02d0ae598e95dc970b74767f19372d61af8", "a hash or random id", "commit [id]"),
        ("run req_8FkQ2mZp4LtX9aBc7Yd1", "a random id", "run [id]"),
        ("x-anthropic-billing-header: cc_version=2.1; cch=3f2b8;\nYou are", "a billing header", "You are"),
    ],
)
def test_volatile_text_is_found_and_replaced(text: str, description: str, stabilized: str) -> None:
    assert [span.description for span in find_volatile_spans(text)] == [description]
    assert stabilize_text(text, RULES)[0] == stabilized


@pytest.mark.parametrize(
    "text",
    [
        "ratio 16:9 or 3:2, python 3.11.7, port 8026, see chapter 10:400",
        "claude-opus-4-5-20251101 and gpt-5 and qwen3-coder-480b",
        "the colour #a1b2c3, sha 9fceb02, byte 0x1f, deadbeefdeadbeefdead",
        "call 555-1234 at room 12/2024, snake_case_names_that_are_quite_long, a number 1234567890123456",
    ],
)
def test_constant_text_is_not_volatile(text: str) -> None:
    assert [text[span.start : span.end] for span in find_volatile_spans(text)] == []


def test_rules_replace_only_their_own_spans() -> None:
    text = f"{UUID} at 14:22 on 2026-11-28"
    assert stabilize_text(text, [TIMES]) == (f"{UUID} at [time] on 2026-11-28", {TIMES: 1})
    assert stabilize_text(text, [DATES, IDS]) == ("[id] at 14:22 on [date]", {DATES: 1, IDS: 1})
    assert stabilize_text(text, []) == (text, {})
    assert stabilize_text("x-anthropic-billing-header: a\nb", [BILLING]) == ("b", {BILLING: 1})


def test_large_texts_are_searched_fast() -> None:
    for text in ("a-" * 200_000, "0" * 400_000, "f" * 400_000, "1:" * 200_000, "ab_" + "A" * 400_000):
        assert stabilize_text(text, RULES)[0] == text


def test_head_has_leading_system_texts_and_tools() -> None:
    messages = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "late"},
    ]
    fields = {"messages": msgspec.Raw(msgspec.json.encode(messages)), "tools": [make_tool("a")]}
    head = extract_head(fields)
    assert head.system == "one\n\ntwo\nthree" and len(head.tools) == 1
    assert extract_head({"messages": messages, "tools": [make_tool("a")]}) == head
    for broken in ({}, {"messages": msgspec.Raw(b'"x"')}, {"messages": [1]}, {"tools": [2], "messages": None}):
        assert extract_head(broken) == PromptHead("", ())


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("It is 14:22:33.", "It is 14:25:01.", "a time of day in line 1 of the system text is new"),
        (
            "You.\nNow 2026-11-28T14:22:33Z",
            "You.\nNow 2026-11-28T14:25:01Z",
            "a time in line 2 of the system text is new",
        ),
        (f"a {UUID} b", f"a {UUID.replace('3', '4')} b", "a UUID in line 1 of the system text is new"),
        ("You are brief.", "You are long.", ""),
        ("It is 14:22, be brief", "It is 14:22, be long", ""),
        ("same", "same", ""),
    ],
)
def test_volatile_changes_of_system_text_are_described(old: str, new: str, why: str) -> None:
    assert describe_changes(PromptHead(old, ()), PromptHead(new, ())) == why


def test_change_deep_in_long_system_text_is_described() -> None:
    before = "Be brief, id 12.\n" * 10_000 + "x" * 10_000
    old, new = (PromptHead(f"{before} It is 14:2{minute}.", ()) for minute in (2, 3))
    assert describe_changes(old, new) == "a time of day in line 10001 of the system text is new"


def test_too_long_texts_and_tools_are_left_out() -> None:
    system, tools = "x" * (TEXT_CHARS_MAX + 1), [make_tool("a", text="x" * TOOLS_BYTES_MAX)]
    body = {"messages": [{"role": "system", "content": system}], "tools": tools}
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}
    assert extract_head(body) == extract_head(raw) == PromptHead(system[:-1], ())
    late = system + " It is 14:22."
    assert stabilize_text(f"It is 14:22. {late}", RULES) == (f"It is [time]. {late}", {TIMES: 1})


def test_changes_of_tools_are_described() -> None:
    def head(*tools: dict[str, object]) -> PromptHead:
        return extract_head({"messages": [], "tools": list(tools)})

    a, b, other_a = make_tool("a"), make_tool("b"), make_tool("a", type="object")
    assert describe_changes(head(a, b), head(b, a)) == "the tools come in another order"
    assert describe_changes(head(a), head(other_a)) == "tools: a changed"
    assert describe_changes(head(a, b), head(make_tool("c"), make_tool("d"), make_tool("e"))) == "", "another agent's"
    assert describe_changes(head(a), head(a, b)) == "tools: b new"
    assert describe_changes(head(a, b), head(a)) == "tools: b gone"
    assert describe_changes(head(), head(a)) == ""


def test_head_is_compared_with_most_similar_recent_one() -> None:
    heads, root = PromptHeadCache(), b"r" * 16
    assert heads.explain_change(root, PromptHead("It is 14:22.", ())) == ""
    heads.add(root, PromptHead("It is 14:22.", ()))
    heads.add(root, PromptHead("You are a title writer.", ()))
    assert (
        heads.explain_change(root, PromptHead("It is 14:23.", ()))
        == "a time of day in line 1 of the system text is new"
    )
    assert heads.explain_change(root, PromptHead("It is 14:22.", ())) == ""
    for number in range(100):
        heads.add(root, PromptHead(f"agent {number}", ()))
    assert heads.explain_change(root, PromptHead("It is 14:23.", ())) == ""


def test_heads_of_other_namespaces_are_not_compared() -> None:
    heads, mine, yours = PromptHeadCache(), b"m" * 16, b"y" * 16
    old, new = (
        extract_head({"messages": [], "tools": tools})
        for tools in ([make_tool("a")], [make_tool("a"), make_tool("hush")])
    )
    heads.add(mine, new)
    assert heads.explain_change(yours, old) == ""
    heads.add(yours, old)
    assert heads.explain_change(yours, new) == "tools: hush new", "though it is no news to somebody else"
    assert heads.explain_change(mine, old) == "tools: hush gone"


def test_rules_stabilize_only_the_head() -> None:
    talk = {"role": "user", "content": f"at 14:22 {UUID}"}
    body = {
        "messages": [{"role": "system", "content": [{"type": "text", "text": "It is 14:22."}]}, talk],
        "tools": [make_tool("b"), make_tool("a")],
        "temperature": 1,
    }
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}
    for given in (body, raw):
        stabilized, counts = stabilize_fields(given, RULES)
        read = msgspec.json.decode(msgspec.json.encode(stabilized))
        assert read["messages"] == [{"role": "system", "content": [{"type": "text", "text": "It is [time]."}]}, talk]
        assert read["tools"] == [make_tool("a"), make_tool("b")] and read["temperature"] == 1
        assert counts == {TIMES: 1, TOOL_ORDER: 1}
        assert stabilize_fields(stabilized, RULES) == (stabilized, {})
    assert body["messages"][0]["content"][0]["text"] == "It is 14:22.", "the client's own body is left as it is"


def test_body_without_changes_is_returned_itself() -> None:
    for body in ({"messages": [{"role": "system", "content": "Be brief."}]}, {"messages": 3}, {"prompt": "14:22"}):
        stabilized, counts = stabilize_fields(body, RULES)
        assert stabilized is body and not counts
