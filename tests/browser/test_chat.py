"""Chat of the dashboard on a real pair with a client key and a model that reasons: sent, stopped, branched."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser.chromium import Chromium
from support.pair.pair import Pair

LOOKS = (Path(__file__).parents[1] / "support" / "browser" / "looks.js").read_text()
KEY = "key-of-the-chat"
SYSTEM = "You answer briefly, and only what was asked. " * 20
LONG_MESSAGE = "Harbour pilots know the tides. " * 4000  # a prefill of some seconds
LAST = "document.querySelector('#turns > :last-child')"
SHOWN = "[...document.querySelectorAll('#turns .message > .text')].map((each) => each.textContent)"


@pytest.fixture(scope="module")
def pair(chromium: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Real pair; skipped without a browser."""
    from support.agent_model.agent_folder import build  # here, so that tests without a model don't import mlx

    folder = build(tmp_path_factory.mktemp("models") / "agent")
    environment = {**os.environ, "WARMLINE_CLIENT_KEY": KEY}
    home = tmp_path_factory.mktemp("chat")
    with Pair(home, folder, "--prefill-step-size", "512", environment=environment) as pair:
        yield pair


@pytest.fixture
def page(browser: Chromium, pair: Pair) -> Chromium:
    """Chat without a conversation, at its composer, with the client key."""
    clearing = browser.call("Page.addScriptToEvaluateOnNewDocument", source="sessionStorage.clear()")
    browser.open(f"{pair.url}/admin#chat")
    browser.wait("document.querySelector('#chat-key').checkVisibility() && document.documentElement.dataset.asked")
    browser.call("Page.removeScriptToEvaluateOnNewDocument", **clearing)
    browser.run(f"document.querySelector('#chat-key').value = {json.dumps(KEY)}")
    browser.run(LOOKS)
    browser.run("document.querySelector('#chat-text').focus()")
    return browser


def type_text(page: Chromium, text: str) -> None:
    page.call("Input.insertText", text=text)


def send(page: Chromium, text: str) -> str:
    """Send a message by keyboard; the text of its answer, with what was reused and why no more, once that is known."""
    type_text(page, text)
    page.press("Enter")
    page.wait(f"{LAST}.querySelector('.message > .text').textContent === {json.dumps(text)}")
    page.wait(f"{LAST}.querySelector('.miss').checkVisibility()")
    return str(page.run(f"{LAST}.querySelector('.answer').innerText"))


def test_turns_report_reuse_and_branch(page: Chromium, pair: Pair, screenshots: Path) -> None:
    page.run(f"document.querySelector('#chat-system').value = {json.dumps(SYSTEM)}")
    first = send(page, "What is the capital of France?")
    assert "Paris." in first and "\ncold\n0 of " in first and "first-request" in first
    page.run(f"{LAST}.querySelector('summary').click()")
    assert len(page.run(f"{LAST}.querySelector('.reasoning .text').innerText")) > 10
    second = send(page, "Say: <b>pong</b>")
    reused = int(page.run(f"{LAST}.querySelector('.reuse').textContent.match(/([\\d,]+) of/)[1].replace(',', '')"))
    assert reused > 100 and "first token after" in second and "tokens/s" in second
    assert page.run("document.querySelector('#chat-said').textContent") in second, "said once, when it was whole"
    assert page.run("document.querySelectorAll('#turns .answer .text b, img').length") == 0, "text stays text"

    page.run("document.querySelector('#turn-1 .edit').focus()")
    page.press("Enter")
    assert page.run("document.activeElement.value") == "What is the capital of France?"
    page.press("Escape")
    assert page.run("document.activeElement.matches('#turn-1 .edit')"), "the focus is back"
    page.press("Enter")
    page.run("document.activeElement.select()")
    edited = send(page, "Describe Japan as JSON.")
    assert "Tokyo" in edited and "\ncold\n" not in edited
    assert page.run(SHOWN) == ["Describe Japan as JSON."]
    names = {each["client"] for each in pair.cachectl("ls")["sessions"]}
    assert len(names) == 2 and any(name.endswith(" branch 2") for name in names), "a session for each branch"
    page.run("document.querySelector('.branches button').focus()")
    page.press("Enter")
    assert page.run(SHOWN) == ["What is the capital of France?", "Say: <b>pong</b>"]
    assert page.run("document.querySelector('.place').textContent") == "1/2"
    check_looks(page, screenshots)

    page.run(f"{LAST}.querySelector('.miss a').focus()")
    request = page.run("document.activeElement.hash.split('=')[1]")
    page.press("Enter")
    page.wait(f"document.activeElement.id.startsWith('request-{request}')")
    page.wait("document.querySelector('.panel .verdict b')")
    page.run("history.back()")
    page.wait("document.querySelector('#chat-view').checkVisibility()")
    page.call("Page.reload")
    page.wait(f"{SHOWN}.length === 2 && document.querySelector('#chat-key').value === ''")
    assert page.list_problems() == [], "nor a violation of the page's policy"
    assert [url for url in page.list_requested_urls() if not url.startswith(f"{pair.url}/")] == []


def check_looks(page: Chromium, screenshots: Path) -> None:
    for name, size in (("desktop", (1280, 900)), ("phone", (360, 740))):
        for scheme in ("light", "dark"):
            page.set_viewport(*size, scheme=scheme, motion="reduce")
            wrong = {each: page.run(f"looks.{each}()") for each in ("faint", "wide", "small")}
            assert wrong == {"faint": [], "wide": [], "small": []}, (name, scheme)
            page.save_screenshot(screenshots / f"chat-{name}-{scheme}.png")
    page.set_viewport(1280, 900)
    page.run("document.activeElement.blur(), getSelection().removeAllRanges(), document.querySelector('#skip').focus()")
    expected, met = page.run("looks.operable()"), []
    for place in range(len(expected)):
        if place:
            page.press("Tab")
        name, outline = page.run("looks.focused()")
        assert outline != "none", f"the focus is not seen on {name}"
        met.append(name)
    assert met == expected


def test_escape_stops_and_refusal_keeps_text(page: Chromium) -> None:
    type_text(page, "Two lines:")
    page.press("Enter", shift=True)
    assert page.run("document.querySelector('#chat-text').value") == "Two lines:\n", "not sent"
    page.run(f"document.querySelector('#chat-text').value = {json.dumps(LONG_MESSAGE)}")
    page.press("Enter")
    page.wait(f"Number({LAST}.querySelector('[role=progressbar]').ariaValueNow) >= 512")
    assert page.run("document.querySelector('#chat-send').textContent") == "Stop"
    page.press("Escape")
    page.wait(f"{LAST}.querySelector('.failure p').textContent.startsWith('Stopped.')")
    assert page.run("document.querySelector('#chat-send').textContent") == "Send"

    page.run("document.querySelector('#chat-key').value = ''")
    type_text(page, "Say: one")
    page.press("Enter")
    assert page.run("document.activeElement.id") == "chat-key"
    assert page.run("document.querySelector('#chat-text').value") == "Say: one"
    type_text(page, "wrong")
    page.run("document.querySelector('#chat-text').focus()")
    page.press("Enter")
    page.wait(f"{LAST}.querySelector('.failure.bad p').textContent.startsWith('Incorrect API key provided')")
    page.run(f"document.querySelector('#chat-key').value = {json.dumps(KEY)}")
    page.run(f"{LAST}.querySelector('.failure button').click()")
    page.wait(f"{LAST}.querySelector('.answer > .text').textContent === 'one'")
    page.wait("!document.querySelector('#chat-new').disabled && (document.querySelector('#chat-new').click(), true)")
    page.wait("document.querySelector('#dialog').open")
    page.press("Escape")
    page.wait("!document.querySelector('#dialog').open")
    assert len(page.run(SHOWN)) == 2, "kept"
