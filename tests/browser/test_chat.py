"""Chat of the dashboard on a real pair: streams, stops, edits and branches, and shows what each turn reused."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser.chromium import Chromium
from support.pair.pair import FolderOf, Pair

LOOKS = (Path(__file__).parents[1] / "support" / "browser" / "looks.js").read_text()
DESKTOP, PHONE = (1280, 900), (360, 740)
SYSTEM = "You answer questions about the sea, its tides and its ships. " * 12
HOSTILE = "<img src=x onerror=\"document.title='taken over'\">"
TURNS = "[...document.querySelectorAll('.turn')]"
IS_DONE = "document.querySelector('#chat-send').textContent === 'Send'"


@pytest.fixture(scope="module")
def pair(chromium: Chromium, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Real pair; skipped without a browser."""
    with Pair(tmp_path_factory.mktemp("chat"), tiny_folder("llama"), "--prefill-step-size", "64") as pair:
        yield pair


def open_chat(browser: Chromium, pair: Pair) -> None:
    browser.open(f"{pair.url}/admin#chat")
    browser.wait("document.querySelector('#chat-text').checkVisibility()")
    browser.wait("Number(document.documentElement.dataset.asked) >= 1")
    browser.run("sessionStorage.clear()")
    browser.run(LOOKS)


def fill(browser: Chromium, selector: str, text: str) -> None:
    browser.run(f"document.querySelector('{selector}').focus(), document.activeElement.select?.(), 0")
    browser.call("Input.insertText", text=text)


def send_message(browser: Chromium, text: str) -> None:
    fill(browser, "#chat-text", text)
    browser.press("Enter")


def wait_for_answer(browser: Chromium, turns: int) -> tuple[int, int]:
    """Wait until so many turns are answered and the last one is explained; its reused and all prompt tokens."""
    browser.wait(f"{IS_DONE} && {TURNS}.length === {turns} && {TURNS}.at(-1).querySelector('.miss')?.checkVisibility()")
    shown = browser.run(f"{TURNS}.at(-1).querySelector('.reuse').textContent")
    found = re.search(r"([\d,]+) of ([\d,]+) prompt tokens reused", shown)
    assert found is not None, shown
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def press_button(browser: Chromium, turn: int, text: str) -> None:
    buttons = f"[...{TURNS}.at({turn}).querySelectorAll('button')]"
    browser.run(f"{buttons}.find((each) => each.textContent === '{text}').click()")


def list_branch_counts(browser: Chromium) -> list[str]:
    places = "[...document.querySelectorAll('.branches .place')].filter((each) => each.checkVisibility())"
    return [str(each) for each in browser.run(f"{places}.map((each) => each.textContent)")]


def test_turns_show_what_they_reused(browser: Chromium, pair: Pair, screenshots: Path) -> None:
    open_chat(browser, pair)
    assert browser.run("looks.wide()") == browser.run("looks.faint()") == []
    fill(browser, "#chat-system", SYSTEM)
    fill(browser, "#chat-tokens", "12")
    send_message(browser, HOSTILE)
    cached, prompt = wait_for_answer(browser, 1)
    assert cached == 0 and prompt > 100
    assert "first-request" in browser.run(f"{TURNS}[0].querySelector('.miss').textContent")
    send_message(browser, "And a neap tide?")
    cached, prompt = wait_for_answer(browser, 2)
    assert prompt > cached > 100
    assert browser.run("document.images.length") == 0 and browser.run("document.title") == "Warmline"
    assert browser.run(f"{TURNS}[0].textContent").count(HOSTILE) >= 1

    # an edit of the first message is a branch, which starts from what both have, and the other one is kept
    press_button(browser, 0, "Edit")
    browser.wait(f"{TURNS}[0].querySelector('.editor textarea')?.checkVisibility()")
    fill(browser, ".turn .editor textarea", "What is a spring tide?")
    browser.press("Enter")
    cached, prompt = wait_for_answer(browser, 1)
    assert prompt > cached > 100, "the system text is reused"
    assert list_branch_counts(browser) == ["2/2"]
    browser.save_screenshot(screenshots / "chat-branch.png")
    browser.run("[...document.querySelectorAll('.branches button')].find((each) => each.checkVisibility()).click()")
    browser.wait(f"{TURNS}.length === 2")
    assert list_branch_counts(browser) == ["1/2"]
    pair.settle()
    titles = {session["title"] for session in pair.cachectl("ls")["sessions"]}
    assert titles == {HOSTILE, "What is a spring tide?"}, "each branch is a conversation"

    for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in ("light", "dark"):
            browser.set_viewport(*size, scheme=scheme, motion="reduce")
            wrong = {each: browser.run(f"looks.{each}()") for each in ("faint", "wide", "small")}
            assert wrong == {"faint": [], "wide": [], "small": []}, (name, scheme)
            browser.save_screenshot(screenshots / f"chat-{name}-{scheme}.png")
    browser.set_viewport(*DESKTOP)

    # the link below an answer explains its request in the other view
    browser.run(f"{TURNS}[1].querySelector('.miss a').click()")
    browser.wait("document.querySelector('.panel:not([hidden])')?.textContent.includes('first token')")
    assert not browser.run("document.querySelector('#chat-view').checkVisibility()")
    assert browser.list_problems() == []
    assert [url for url in browser.list_requested_urls() if not url.startswith(f"{pair.url}/")] == []


def test_answer_is_stopped_by_keyboard_and_nothing_typed_is_lost(browser: Chromium, pair: Pair) -> None:
    open_chat(browser, pair)
    fill(browser, "#chat-tokens", "")
    send_message(browser, "Tell me all about it.")
    browser.wait(f"{TURNS}.at(-1)?.querySelector('.answer > .text')?.textContent.length > 20")
    fill(browser, "#chat-text", "typed meanwhile")
    browser.press("Escape")
    browser.wait(f"{IS_DONE} && {TURNS}.at(-1).textContent.includes('Stopped.')")
    assert browser.run("document.querySelector('#chat-text').value") == "typed meanwhile"

    fill(browser, "#chat-tokens", "12")
    browser.run(
        "window.asks = window.fetch, window.fetch = async (url, ...rest) => url.startsWith('/v1')"
        ' ? new Response(\'{"error": {"message": "Too many wait."}}\', { status: 429 })'
        " : window.asks(url, ...rest), 0"
    )
    send_message(browser, "Again?")
    browser.wait(f"{IS_DONE} && {TURNS}.at(-1).textContent.includes('Too many wait.')")
    browser.run("window.fetch = window.asks, 0")
    browser.run(
        f"[...{TURNS}.at(-1).querySelectorAll('button')].find((each) => each.textContent === 'Try again').click()"
    )
    browser.wait(f"{IS_DONE} && {TURNS}.at(-1).querySelector('.reuse').checkVisibility()")
    assert "Again?" in browser.run(f"{TURNS}.at(-1).textContent")


def test_chat_works_by_keyboard(browser: Chromium, pair: Pair) -> None:
    open_chat(browser, pair)
    browser.run("document.activeElement.blur()")
    expected, met = browser.run("looks.operable()"), []
    for _ in expected:
        browser.press("Tab")
        name, outline = browser.run("looks.focused()")
        assert outline != "none", f"the focus is not seen on {name}"
        met.append(name)
    assert met == expected
