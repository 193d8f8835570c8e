"""Dashboard of a real pair: a conversation is warm, explained, pinned and purged; keyboard and all looks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser.chromium import Chromium
from support.pair.pair import FolderOf, Message, Pair

LOOKS = (Path(__file__).parents[1] / "support" / "browser" / "looks.js").read_text()
HOSTILE = "<img src=x onerror=\"document.title='taken over'\"> & more"
SYSTEM = "You answer questions about the sea, its tides and its ships. " * 12
DESKTOP, PHONE = (1280, 900), (360, 740)
STEADY = {"role": "system", "content": SYSTEM}


@pytest.fixture(scope="module")
def pair(chromium: Chromium, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Real pair; skipped without a browser."""
    with Pair(tmp_path_factory.mktemp("dashboard"), tiny_folder("llama")) as pair:
        yield pair


def open_dashboard(browser: Chromium, pair: Pair) -> None:
    """Open the dashboard and wait until all data is shown."""
    browser.open(f"{pair.url}/admin")
    browser.wait("Number(document.documentElement.dataset.asked) >= 1")
    browser.run(LOOKS)


def poll_now(browser: Chromium) -> None:
    """Let the page poll at once, and wait for the answer."""
    browser.wait("""(window.before ??= document.documentElement.dataset.asked,
        document.dispatchEvent(new Event("visibilitychange")),
        document.documentElement.dataset.asked !== window.before && (delete window.before, true))""")


def send_turn(pair: Pair, messages: list[Message], name: str) -> int:
    """Send a turn and append its answer to `messages`; the number of reused prompt tokens."""
    reply = pair.chat(messages, max_tokens=12, session_id=name)
    messages.append({"role": "assistant", "content": reply.text})
    pair.settle()
    return reply.cached


def test_empty_dashboard_shows_instructions(browser: Chromium, pair: Pair, screenshots: Path) -> None:
    open_dashboard(browser, pair)
    assert browser.run("document.querySelector('#state').textContent") == "Ready"
    shown = browser.run(
        "document.querySelector('#curl').checkVisibility() && document.querySelector('#curl').textContent"
    )
    found = re.fullmatch(r"curl (\S+) .* -d '(.+)'", shown.replace("\\\n", ""), flags=re.DOTALL)
    assert found is not None, shown
    url, body = found.groups()
    assert url == f"{pair.url}/v1/chat/completions"
    assert browser.run("looks.wide()") == browser.run("looks.faint()") == []
    browser.save_screenshot(screenshots / "empty.png")
    assert pair.post("/v1/chat/completions", json.loads(body)).status == 200, "what it says to send is answered"
    pair.settle()
    poll_now(browser)
    browser.wait("document.querySelector('#session-rows b') && document.querySelector('.row .who')")
    title = json.loads(body)["messages"][0]["content"]
    assert browser.run("document.querySelector('#session-rows b').textContent") == title
    assert browser.run("document.querySelector('.row .who').textContent").startswith(f"{title} · ")
    pair.cachectl("purge", "--all", "--yes")
    ids = {"prompt": list(range(5, 200)), "max_tokens": 2}
    assert pair.post("/v1/completions", ids).status == 200, "token ids have no title"
    pair.settle()
    check_unnamed_session_label(browser, pair)
    pair.cachectl("purge", "--all", "--yes")


def check_unnamed_session_label(browser: Chromium, pair: Pair) -> None:
    """Check that an unnamed session is labelled by its time in all three places."""
    poll_now(browser)
    browser.wait("document.querySelector('#session-rows b.unnamed') && document.querySelector('.row .who')")
    name = browser.run("document.querySelector('#session-rows b').textContent")
    assert re.fullmatch(r"conversation started \d\d:\d\d:\d\d", name)
    assert browser.run("document.querySelector('.row .who').textContent") == f"{name} · completion"
    assert f"ends: {name}" in browser.run("document.querySelector('#tree').textContent"), "the one tree is open"
    browser.run("document.querySelector('#session-rows .danger').click()")
    browser.wait("document.querySelector('#dialog').open")
    assert browser.run("document.querySelector('#dialog-title').textContent") == f"Purge the conversation {name}?"
    browser.press("Escape")
    browser.wait("!document.querySelector('#dialog').open")


def test_conversation_from_warm_to_purged(browser: Chromium, pair: Pair, screenshots: Path) -> None:
    talk: list[Message] = [STEADY, {"role": "user", "content": "What is a spring tide?"}]
    assert send_turn(pair, talk, "steady") == 0
    talk.append({"role": "user", "content": "And a neap tide?"})
    cached = send_turn(pair, talk, "steady")
    edited: list[Message] = [{"role": "system", "content": SYSTEM.replace("tides", "winds", 1)}]
    edited.append({"role": "user", "content": HOSTILE})
    send_turn(pair, edited, HOSTILE)
    open_dashboard(browser, pair)

    # warm, and by whom
    browser.wait("document.querySelectorAll('.row').length === 3")
    assert browser.run("[...document.querySelectorAll('.source')].map((each) => each.textContent)") == [
        "resident",
        "resident",
        "cold",
    ]
    tokens = browser.run("document.querySelectorAll('.row .tokens')[1].textContent")
    assert tokens.startswith(f"{cached} of ") and cached > 100
    names = browser.run("[...document.querySelectorAll('#session-rows b')].map((each) => each.textContent)")
    assert names == [HOSTILE, "What is a spring tide?"]
    assert browser.run("document.images.length") == 0 and browser.run("document.title") == "Warmline"
    browser.save_screenshot(screenshots / "desktop-light.png")

    # why not warmer
    browser.run("document.querySelector('.row').focus()")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.panel .side mark').length >= 2")
    marked = browser.run("[...document.querySelectorAll('.side mark')].map((each) => each.textContent).join('|')")
    assert "t" in marked and "w" in marked
    assert browser.run("document.querySelector('.row').getAttribute('aria-expanded')") == "true"
    notes = browser.run("[...document.querySelectorAll('.panel .note')].map((each) => each.textContent).join('|')")
    assert "message 1" in notes and "First token after" in notes

    # where it landed
    browser.run("document.querySelector('.panel > button').click()")
    browser.wait("document.activeElement.matches('[role=treeitem].on-path')")
    assert "ends at token" in browser.run("document.activeElement.firstChild.textContent")
    assert "reused up to token" in browser.run("document.querySelector('#tree').textContent")
    browser.save_screenshot(screenshots / "explained.png")
    check_all_looks(browser, screenshots)

    check_pin_and_purge(browser, pair, screenshots)
    assert browser.list_problems() == []
    assert [url for url in browser.list_requested_urls() if not url.startswith(f"{pair.url}/")] == []


def check_all_looks(browser: Chromium, screenshots: Path) -> None:
    """Check in each look that text is readable and nothing is wider than the window."""
    for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in ("light", "dark"):
            browser.set_viewport(*size, scheme=scheme, motion="reduce")
            wrong = {each: browser.run(f"looks.{each}()") for each in ("faint", "wide", "small")}
            assert wrong == {"faint": [], "wide": [], "small": []}, (name, scheme)
            assert browser.run("getComputedStyle(document.querySelector('.bar i')).transitionDuration") == "0s"
            browser.save_screenshot(screenshots / f"{name}-{scheme}.png")
    browser.set_viewport(*DESKTOP)


def check_pin_and_purge(browser: Chromium, pair: Pair, screenshots: Path) -> None:
    rows = "[...document.querySelectorAll('#session-rows tr')]"
    row = f"{rows}.find((each) => each.textContent.includes({json.dumps(HOSTILE)}))"
    browser.run(f"{row}.querySelector('.pin').click()")
    browser.wait(f"{row}.querySelector('.pin').getAttribute('aria-pressed') === 'true'")
    open_dashboard(browser, pair)
    browser.wait(f"{row}.querySelector('.pin').textContent === 'Pinned'")
    browser.set_viewport(*DESKTOP, scheme="dark")
    assert browser.run("looks.faint()") == []
    browser.set_viewport(*DESKTOP)
    before = pair.cachectl("inspect")["sessions"]
    kept, gone = (next(each for each in before if each["client"] == name) for name in ("steady", HOSTILE))

    browser.run(f"{row}.querySelector('.danger').focus()")
    browser.press("Enter")
    browser.wait("document.querySelector('#dialog').open")
    assert HOSTILE in browser.run("document.querySelector('#dialog-title').textContent")
    would = f"Conversation {gone['id']} goes: 1 segment, {gone['bytes_alone'] / 1000:.0f} KB."
    assert browser.run("document.querySelector('#dialog-text').textContent").startswith(would)
    assert browser.run("looks.faint()") == browser.run("looks.wide()") == []
    browser.save_screenshot(screenshots / "purge.png")
    held = []
    for _ in range(4):
        held.append(browser.run("document.activeElement.id"))
        browser.press("Tab")
    assert {"dialog-cancel", "dialog-do"} <= set(held) <= {"dialog-cancel", "dialog-do", "dialog", ""}
    # Shut before its answer is heard, and there is one question at a time.
    browser.run("document.querySelector('#dialog').addEventListener('close', () => { window.answered = true })")
    browser.press("Escape")
    browser.wait("window.answered && !document.querySelector('#dialog').open")
    assert browser.run(f"document.activeElement === {row}.querySelector('.danger')"), "back where it was asked from"
    assert {each["id"] for each in pair.cachectl("inspect")["sessions"]} == {kept["id"], gone["id"]}

    browser.press("Enter")
    browser.wait("document.querySelector('#dialog').open")
    browser.run("document.querySelector('#dialog-do').click()")
    browser.wait("document.querySelector('#said').textContent.startsWith('Purged 1 conversation')")
    browser.wait(f"!({row})")
    assert [each["id"] for each in pair.cachectl("inspect")["sessions"]] == [kept["id"]]


def test_dashboard_works_by_keyboard(browser: Chromium, pair: Pair) -> None:
    open_dashboard(browser, pair)
    browser.wait("document.querySelectorAll('#session-rows tr').length > 0")
    expected, met = browser.run("looks.operable()"), []
    for _ in expected:
        browser.press("Tab")
        name, outline = browser.run("looks.focused()")
        assert outline != "none", f"the focus is not seen on {name}"
        met.append(name)
    assert met == expected


def test_polling_shifts_no_layout(browser: Chromium, pair: Pair) -> None:
    """A turn more of a conversation that is shown: rows stay where they are while one is open."""
    talk: list[Message] = [{"role": "user", "content": "Something else meanwhile."}]
    send_turn(pair, talk, "meanwhile")
    talk.append({"role": "user", "content": "More."})
    open_dashboard(browser, pair)
    browser.wait("document.querySelectorAll('#session-rows tr').length > 0")
    browser.run("document.querySelector('.row').click()")
    browser.wait("document.querySelector('.panel .facts')")
    browser.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")  # its own opening moves things
    browser.run("""window.shifts = [];
        new PerformanceObserver((list) => shifts.push(...list.getEntries().flatMap((each) =>
            each.sources.map((source) => source.node?.outerHTML ?? "gone")))).observe({ type: "layout-shift" })""")
    send_turn(pair, talk, "meanwhile")
    poll_now(browser)
    browser.wait("document.querySelector('#newer').checkVisibility()")
    browser.run("document.activeElement.blur()")
    poll_now(browser)
    assert browser.run("new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(shifts))))") == []


STATUS = """{
    at: Date.now() / 1000, uptime_s: 5, running: 1, queued: 0, settling: 0, residents: [],
    disk_budget_bytes: 1e9, reuse: "fast",
    totals: {segments: 3, checkpoints: 0, sessions: 1, tokens: 9, bytes_segments: 5e8, bytes_checkpoints: 0,
        bytes_quarantined: 0, bytes_writing: 0, bytes_doomed: 0, bytes_index: 0},
    live: [], connections: 1, backend_kills: 0, backend: "", persistence: "ok",
    engine: {ready: true, failure: "", model: "m", resident_bytes: 1, running_bytes: 0, memory_budget_bytes: 4,
        prefill_rates: [], decode_tokens_per_s: 0},
}"""


@pytest.mark.parametrize(
    ("change", "state", "text"),
    [
        ("reuse = 'off'", "ready", "Ready"),
        ("loading = true; status.backend = 'the model is still loading'", "loading", "Loading the model"),
        ("engine.failure = 'no weights'", "down", "Failed"),
        ("backend = 'it does not answer'", "down", "Backend down"),
        ("persistence = 'the disk is full'", "warning", "Ready, not saving"),
        ("engine.layout = {persistent: false, why_not: 'no codec'}", "warning", "Ready, not saving"),
    ],
)
def test_problems_are_shown_in_words(browser: Chromium, pair: Pair, change: str, state: str, text: str) -> None:
    open_dashboard(browser, pair)
    found = browser.run(f"""import('/admin/overview.js').then((page) => {{
        const status = {STATUS}; status.{change}; page.showStatus(status);
        const find = (selector) => document.querySelector(selector);
        return [find('#state').dataset.state, find('#state').textContent,
            find('#facts [data-key=persistence] dd').textContent, looks.faint()]; }})""")  # at once: the page polls
    assert found == [state, text, "off" if "Ready" in text else "on", []]


def test_purged_request_is_not_explained(browser: Chromium, pair: Pair) -> None:
    """Its texts don't stay in a panel that was open, whoever purged it."""
    for name in ("harbours", "crews"):
        system = {"role": "system", "content": SYSTEM.replace("ships", name)}
        send_turn(pair, [system, {"role": "user", "content": name}], name)
    open_dashboard(browser, pair)
    browser.wait("document.querySelector('#session-rows b').textContent === 'crews'")
    browser.wait("document.querySelector('.row .who').textContent.startsWith('crews')")
    browser.run("document.querySelector('.row').click()")
    panel = "document.querySelector('.panel:not([hidden])').textContent"
    browser.wait(f"{panel}.includes('What came instead') && {panel}.includes('first token')")
    button = "document.querySelector('.panel:not([hidden]) > button')"
    browser.run(f"{button}.focus()")
    session = browser.run("document.querySelector('#session-rows tr').dataset.key")
    browser.run(f"import('/admin/api.js').then((api) => api.post('purge', {{ session: '{session}' }}))")
    poll_now(browser)
    browser.wait(f"{panel}.includes('No more is known of it') && !{panel}.includes('What came instead')")
    assert browser.run(f"document.activeElement === {button}"), "the focus stays"


def test_one_dialog_at_a_time(browser: Chromium, pair: Pair) -> None:
    """And none about what somebody else has purged meanwhile."""
    for name in ("first", "second"):
        send_turn(pair, [{"role": "system", "content": name * 40}, {"role": "user", "content": name}], name)
    open_dashboard(browser, pair)
    first, second = (
        f"[...document.querySelectorAll('#session-rows tr')].find((each) => each.textContent.startsWith('{name}'))"
        for name in ("first", "second")
    )
    browser.wait(f"{first} && {second}")
    browser.run(f"{first}.querySelector('.danger').click(), {second}.querySelector('.danger').click()")
    browser.wait("document.querySelector('#dialog').open")
    session = browser.run(f"{first}.dataset.key")
    browser.run(f"import('/admin/api.js').then((api) => api.post('purge', {{ session: '{session}' }}))")
    assert browser.run("document.querySelector('#dialog-title').textContent") == "Purge “first”?"
    browser.run("document.querySelector('#dialog-do').click()")
    browser.wait(f"document.querySelector('#said').textContent === 'Conversation {session} is not stored any more.'")
    browser.wait(f"!({first})")
    browser.run(f"{second}.querySelector('.danger').click()")
    browser.wait("document.querySelector('#dialog-title').textContent === 'Purge “second”?'")
    browser.press("Escape")


def test_invisible_characters_are_escaped(browser: Chromium, pair: Pair) -> None:
    """Texts may differ by that alone, and what turns text around would hide where they do."""
    open_dashboard(browser, pair)
    text = json.dumps("a\u200bb\u202ec\x1b[1m\x00\u2028\n\tä 字 ✓")
    shown = browser.run(f"import('/admin/format.js').then((page) => page.visible({text}))")
    assert shown == "a\\u{200b}b\\u{202e}c\\u{1b}[1m\\u{0}\\u{2028}\n\tä 字 ✓"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("new Response('<html>Somebody else')", "The proxy's answers can't be read: reload this page (since "),
        ("new Response('{}')", "The proxy's answers can't be read: reload this page (since "),
        ("Promise.reject(new TypeError('network'))", "Proxy unreachable (since "),
        ("new Response('No.', { status: 401 })", "The proxy refuses: No. Reload this page to be asked for the key. ("),
    ],
)
def test_unexpected_answers_are_reported(browser: Chromium, pair: Pair, answer: str, message: str) -> None:
    open_dashboard(browser, pair)
    browser.run(f"window.asks = window.fetch, window.fetch = async () => {answer}, 0")
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    browser.wait("document.querySelector('#banner').checkVisibility()")
    assert browser.run("document.querySelector('#banner').textContent").startswith(message)
    browser.run("window.fetch = window.asks, 0")
    poll_now(browser)
    assert not browser.run("document.querySelector('#banner').checkVisibility()")


def test_running_requests_show_progress(browser: Chromium, pair: Pair) -> None:
    open_dashboard(browser, pair)
    live = """{id: "a", endpoint: "chat", client_model: "m", client_session: "<b>s</b>", phase: "prefilling",
        source: "restored", age_s: 3, queue_s: 0, restore_s: 0, ttft_s: 0, prompt_tokens: 20000, reused_tokens: 4000,
        prefilled_tokens: 5000}"""
    assert show_live(browser, live) == {
        "who": "<b>s</b>",
        "phase": "prefilling, 3 s",
        "amount": "5,000 of 20k tokens, 4,000 restored",
        "value": "5000",
        "widths": ["20%", "5%"],  # reused and computed
        "bar": True,
    }
    shown = show_live(browser, f"{{...{live}, phase: 'waiting', source: 'shared', prompt_tokens: 0, choices: 2}}")
    assert (shown["phase"], shown["amount"]) == ("waiting for another's prefill, 3 s", "2 choices")
    assert not shown["bar"]


def show_live(browser: Chromium, live: str) -> Any:
    """Show one running request; what the page then says of it, read at once: the page polls."""
    return browser.run(f"""import('/admin/overview.js').then((page) => {{
        page.showStatus({{...{STATUS}, live: [{live}]}});
        const find = (selector) => document.querySelector(`#live ${{selector}}`);
        return {{
            who: find(".who").textContent, phase: find(".phase").textContent, amount: find(".amount").textContent,
            value: find("[role=progressbar]").ariaValueNow, bar: find(".bar").checkVisibility(),
            widths: [...document.querySelectorAll("#live .bar i")].map((each) => each.style.width) }}; }})""")


def test_requests_with_same_name_have_own_rows(browser: Chromium, pair: Pair) -> None:
    """Clients may name them."""
    open_dashboard(browser, pair)
    rows = browser.run("""import('/admin/requests.js').then((page) => {
        const line = (at) => ({ id: "mine", at, endpoint: "chat", client_model: "m", session: "", client: "", key: "",
            outcome: "ok", source: "cold", why_not_warmer: `at ${at}`, error: "", cause: "", audit: "", guard: "",
            prompt_tokens: 1, cached_tokens: 0, prefilled_tokens: 1, generated_tokens: 1, saved_tokens: 0,
            queue_s: 0, restore_s: 0, prefill_s: 1, decode_s: 1, ttft_s: 1, total_s: 2, dispatches: 1 });
        for (const newest of [2, 3])
            page.showRequests({ offset: 0, total: 2, requests: [line(newest), line(newest - 1)] });
        const rows = [...document.querySelectorAll(".row")];
        rows[1].click();
        return rows.map((row) => [row.querySelector(".reason").textContent, row.ariaExpanded]); })""")
    assert rows == [["at 3", "false"], ["at 2", "true"]]
