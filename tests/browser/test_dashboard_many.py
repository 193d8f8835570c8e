"""Dashboard with 10,000 segments: the proxy's backend is away, and the proxy itself is killed."""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser.chromium import Chromium
from support.many_segments import CHAIN, fill_index
from support.processes import RunningProcess, free_port
from warmline_common.storage.home import Home
from warmline_proxy.auth.key_store import ADMIN_KIND, ensure_key
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import RequestRecord
from warmline_proxy.store.tables import REQUESTS_MAX

LOOKS = (Path(__file__).parents[1] / "support" / "browser" / "looks.js").read_text()
SEGMENTS = 10_000
MEMORY = Path("/dev/shm")  # ten thousand files take a disk seconds
BUDGET_GB = 1.0
ANSWER_BYTES_MAX = 60_000
ELEMENTS_MAX = 3000
POLL = "document.dispatchEvent(new Event('visibilitychange'))"
FOCUSED = "document.activeElement.firstChild.textContent"


class ProxyProcess:
    """Proxy on one port, which can be killed and started again."""

    def __init__(self, home: Home, *flags: str) -> None:
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "warmline_proxy", "--home", str(home.root), "--port", port]
        self._command += ["--backend-url", "http://127.0.0.1:9", "--disk-budget-gb", str(BUDGET_GB), *flags]
        self.running = self.start()

    def start(self) -> RunningProcess:
        self.running = RunningProcess(self._command)
        self.running.wait_for("listening|serving|http://127", 60)
        return self.running

    def kill(self) -> None:
        self.running.process.kill()
        self.running.process.wait()


def record_requests(index: Index) -> None:
    """Record the maximum of requests, one every two minutes up to now, each continuing a conversation."""
    sources, now = ("resident", "restored", "cold"), time.time()
    sessions = [row.id for row in index.sessions()]
    for number in range(REQUESTS_MAX):
        source = sources[number % 3]
        index.record_request(
            RequestRecord(
                id=f"{number:024x}",
                at=now - 120 * (REQUESTS_MAX - 1 - number),
                endpoint="chat",
                client_model="any/name",
                session=sessions[number],
                outcome="ok",
                source=source,
                why_not_warmer="nothing stored" if source == "cold" else f"stored up to token {100 + number}",
                prompt_tokens=1000 + number,
                cached_tokens=0 if source == "cold" else 100 + number,
                queue_s=0.1,
                restore_s=0.2 if source == "restored" else 0.0,
                prefill_s=2.0 if source == "cold" else 0.5,
                decode_s=1.0 + number % 7,
                ttft_s=2.5 if source == "cold" else 0.7,
                total_s=4.0 + number % 7,
            )
        )


@pytest.fixture(scope="module")
def proxy(chromium: Chromium) -> Iterator[ProxyProcess]:
    """Proxy process; skipped without a browser."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        home = Home(Path(folder) / "home")
        home.prepare()
        with Index(home, 1 << 30) as index:
            fill_index(index, SEGMENTS)
            record_requests(index)
        proxy = ProxyProcess(home)
        yield proxy
        proxy.kill()


@pytest.fixture
def page(browser: Chromium, proxy: ProxyProcess) -> Chromium:
    browser.open(f"{proxy.url}/admin")
    browser.wait("document.querySelectorAll('#tree > li').length === 2")
    browser.run(LOOKS)
    return browser


def wait_for_focus(page: Chromium, shown: str) -> None:
    """Wait until the tree's focus is on the row with this text."""
    page.wait(f"document.activeElement.matches('[role=treeitem]') && {FOCUSED}.includes('{shown}')")


def test_tree_of_thousands_is_paged(page: Chromium, screenshots: Path) -> None:
    assert page.run("document.querySelector('#tree-count').textContent") == "10,002 segments"
    assert page.run("document.querySelector('#sessions-count').textContent") == "1,334"
    assert page.run("document.querySelectorAll('#session-rows tr').length") == 12
    page.run("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    page.press("ArrowRight")
    page.wait("document.activeElement.getAttribute('aria-expanded') === 'true'")
    page.press("ArrowRight")
    wait_for_focus(page, "0\u2013128")
    page.press("ArrowRight")
    page.wait("document.querySelectorAll('#tree [aria-level=\"3\"]').length === 31")
    page.press("End")
    page.press("ArrowUp")
    wait_for_focus(page, "Show 30 more of 470")
    page.press("Enter")
    page.wait("document.querySelectorAll('#tree [aria-level=\"3\"]').length === 61")
    assert page.run("document.activeElement.getAttribute('aria-posinset')") == "31", "on the first that came"
    page.save_screenshot(screenshots / "ten-thousand.png")
    page.press("ArrowLeft")
    wait_for_focus(page, "0\u2013128")
    page.press("ArrowLeft")
    page.wait("document.querySelectorAll('#tree [aria-level=\"3\"]').length === 0")
    assert page.run("document.querySelectorAll('#tree [tabindex=\"0\"]').length") == 1
    sizes = [each["encodedDataLength"] for each in page.list_events("Network.loadingFinished")]
    assert len(sizes) > 15 and max(sizes) < ANSWER_BYTES_MAX
    assert page.run("document.querySelectorAll('*').length") < ELEMENTS_MAX
    assert page.list_problems() == []


def test_search_finds_conversation(page: Chromium) -> None:
    page.run("document.querySelector('#search').focus()")
    for character in "nt-877":
        page.press(character)
    page.wait("document.querySelector('#sessions-count').textContent === '1 of 1,334'")
    assert page.run("document.querySelector('#session-rows b').textContent") == "client-877"
    page.run("document.querySelector('#session-rows .actions :nth-child(2)').click()")
    wait_for_focus(page, "ends at token 768")
    assert page.run("document.querySelectorAll('.on-path').length") == 3
    assert "client-877" in page.run(FOCUSED)
    page.run("document.querySelector('#tree-clear').click()")
    page.wait("document.querySelectorAll('.on-path').length === 0")


def test_purge_preview_reports_no_files(page: Chromium) -> None:
    page.wait("document.querySelectorAll('#session-rows b')[1]?.textContent === 'client-half-0'")
    page.run("document.querySelectorAll('#session-rows .danger')[1].click()")
    page.wait("document.querySelector('#dialog').open")
    text = page.run("document.querySelector('#dialog-text').textContent")
    assert "its name only, as others begin with all of it" in text
    page.run("document.querySelector('#dialog-cancel').click()")
    page.wait("!document.querySelector('#dialog').open")
    assert page.run("document.querySelector('#sessions-count').textContent") == "1,334"


def test_columns_sort_both_ways(page: Chromium) -> None:
    head = "document.querySelector('[data-column=bytes]')"
    sizes = "[...document.querySelectorAll('#session-rows td:nth-child(3)')].map((each) => each.textContent)"
    page.run(f"{head}.firstChild.click()")
    page.wait(f"{head}.getAttribute('aria-sort') === 'descending'")
    largest = 256 + 8 + (CHAIN * (256 + 8))
    assert page.run(f"{sizes}[0]") == f"{(largest - 8) / 1000:.1f} KB"
    page.run(f"{head}.firstChild.click()")
    page.wait(f"{head}.getAttribute('aria-sort') === 'ascending'")
    assert page.run(f"{sizes}[0]") == f"{256 * (CHAIN // 2 + 2) / 1000:.1f} KB"


def test_dead_proxy_is_reported_and_reconnected(page: Chromium, proxy: ProxyProcess) -> None:
    assert page.run("document.querySelector('#state').textContent") == "Backend down"
    assert page.run("document.querySelector('#why').checkVisibility()")
    before = page.run("document.querySelector('main').getBoundingClientRect().top + scrollY")
    proxy.kill()
    page.run(POLL)
    page.wait("document.querySelector('#banner').checkVisibility()")
    assert page.run("document.querySelector('#banner').textContent").startswith("Proxy unreachable (since ")
    assert page.run("document.querySelector('#state').textContent") == "Not known"
    assert page.run("looks.faint()") == page.run("looks.wide()") == []
    assert page.run("document.querySelectorAll('#session-rows tr').length") == 12, "what was known stays"
    assert page.run("document.querySelector('main').getBoundingClientRect().top + scrollY") == before, "where it was"
    proxy.start()
    page.run(POLL)
    page.wait("!document.querySelector('#banner').checkVisibility()")


def test_hidden_page_does_not_poll(browser: Chromium, proxy: ProxyProcess) -> None:
    hide = "Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true })"
    hiding = browser.call("Page.addScriptToEvaluateOnNewDocument", source=hide)
    browser.open(f"{proxy.url}/admin")
    browser.wait("document.querySelector('#curl').textContent !== ''")
    browser.call("Page.removeScriptToEvaluateOnNewDocument", **hiding)
    assert [url for url in browser.list_requested_urls() if "/warmline/" in url] == []
    browser.run("delete document.visibilityState; document.dispatchEvent(new Event('visibilitychange'))")
    browser.wait("Number(document.documentElement.dataset.asked) >= 1")


def test_requests_are_paged(page: Chromium, screenshots: Path) -> None:
    reasons = "[...document.querySelectorAll('.row .reason')].map((each) => each.textContent)"
    page.wait("document.querySelectorAll('.row').length === 15")
    assert page.run("document.querySelector('#requests-count').textContent") == "1,000 kept"
    assert page.run(f"{reasons}.slice(0, 2)") == ["stored up to token 1099", "nothing stored"]
    assert page.run("document.querySelector('#requests-back').disabled")
    page.run("document.querySelector('#requests-on').click()")
    page.wait(f"{reasons}[0] === 'stored up to token 1084'")
    page.run("document.querySelector('#newer').click()")
    page.wait(f"{reasons}[0] === 'stored up to token 1099'")
    assert page.run("document.querySelector('#reuse-span').textContent") == "of the last 1,000 requests"
    assert page.run("document.querySelector('#figures dd:nth-of-type(1)').textContent").endswith(" %")
    bars, bars_with_requests, rows = page.run(
        "(() => { const bars = [...document.querySelectorAll('#chart g')];"
        " const tall = bars.filter((bar) => [...bar.children].some((each) => Number(each.getAttribute('height')) > 0));"
        " return [bars.length, tall.length, document.querySelectorAll('#chart-rows tr').length]; })()"
    )
    assert 12 < bars <= 48 and bars_with_requests == rows > 12, "a bar without requests has no row"
    widths = page.run(
        "[...document.querySelectorAll('.row')[0].querySelectorAll('.bar i')].map((each) => each.style.width)"
    )
    longest_s = 10.0
    spans = [round(float(width.removesuffix("%")) * longest_s / 100, 1) for width in widths]
    assert spans == [0.1, 0.0, 0.5, 6.0, 2.4], "in the end what is none of them"
    for width in (360, 1280):
        page.set_viewport(width, 800)
        assert page.run("looks.wide()") == page.run("looks.faint()") == []
        page.save_screenshot(screenshots / f"thousands-{width}.png")


def test_page_beyond_last_request_returns(page: Chromium) -> None:
    """As where the proxy was started again with another home."""
    reasons = "[...document.querySelectorAll('.row .reason')].map((each) => each.textContent)"
    page.wait("document.querySelectorAll('.row').length === 15")
    page.run("document.querySelector('#requests-on').click()")
    page.wait(f"{reasons}[0] === 'stored up to token 1084'")
    page.run("""window.fetch = ((asks) => async (url, options) => {
        const answer = await asks(url, options);
        if (!url.includes("activity?offset=15")) return answer;
        return Response.json({ ...await answer.json(), requests: [], total: 15 }); })(window.fetch), 0""")
    page.run(POLL)
    page.wait(f"{reasons}[0] === 'stored up to token 1099'")


def test_purged_conversation_leaves_tree(page: Chromium, proxy: ProxyProcess) -> None:
    """A conversation far beyond what is shown of its branch, and by somebody else than this page."""
    page.run("""document.querySelector('#search').value = 'client-901';
        document.querySelector('#search').dispatchEvent(new Event('input'))""")
    page.wait("document.querySelector('#session-rows b').textContent === 'client-901'")
    page.run("document.querySelector('#session-rows .actions :nth-child(2)').click()")
    wait_for_focus(page, "ends at token 768")
    gone = page.run("document.activeElement.dataset.key")
    shown = f"document.querySelector('[data-key=\"{gone}\"]')"
    session = page.run("document.querySelector('#session-rows tr').dataset.key")
    page.run(f"import('/admin/api.js').then((api) => api.post('purge', {{ session: '{session}' }}))")
    page.run(POLL)
    page.wait(f"document.querySelectorAll('.on-path').length === 0 && !{shown}")
    assert not page.run("document.querySelector('#tree-clear').checkVisibility()")
    assert page.run("document.querySelectorAll('#tree > li').length") == 2


def test_expanded_branch_reloads_whole(page: Chromium) -> None:
    """And nothing of it stays that is not stored any more."""
    page.run("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    page.press("ArrowRight")
    page.wait("document.activeElement.getAttribute('aria-expanded') === 'true'")
    page.press("ArrowRight")
    wait_for_focus(page, "0\u2013128")
    page.press("ArrowRight")
    runs = "document.querySelectorAll('#tree [aria-level=\"3\"]')"
    for shown in range(31, 241, 30):
        page.wait(f"{runs}.length === {shown}")
        page.press("End")
        page.press("ArrowUp")
        wait_for_focus(page, "more of")
        page.press("Enter")
    page.wait(f"{runs}.length === 241")
    key = page.run(f"{runs}[5].dataset.key")
    first = page.run(f"{runs}[5].querySelector('.about').textContent")
    page.run(f"""import('/admin/api.js').then(async (api) => {{
        const name = "{first}".match(/client-[\\w-]+/)[0];
        const found = await api.get("sessions", {{ q: name, count: 1 }});
        await api.post("purge", {{ session: found.sessions[0].id }}); }})""")
    page.run(POLL)
    page.wait(f"{runs}.length === 241 && ![...{runs}].some((each) => each.dataset.key === '{key}')")


def test_admin_key_opens_dashboard(browser: Chromium, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    key = ensure_key(home, ADMIN_KIND).key
    proxy = ProxyProcess(home, "--admin-needs-key")
    url = proxy.url.replace("127.0.0.1", "0.0.0.0")  # an address that a browser trusts as little as one in the network
    try:
        with browser.given_password(key) as urls:
            browser.open(f"{url}/admin")
            browser.wait("Number(document.documentElement.dataset.asked) >= 1")
        assert urls == [f"{url}/admin"], "asked once, for the page"
        assert not browser.run("isSecureContext")
        assert browser.list_problems() == []
    finally:
        proxy.kill()
