"""Headless Chromium, controlled by the DevTools protocol over a pipe: no driver, no port, no package.

One thread; what the browser tells meanwhile is kept, so that a test can ask afterwards what the page loaded and logged.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

WAIT_S = 20.0
READ_BYTES = 1 << 20
DESCRIPTOR_MIN = 20
EXECUTABLES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--no-default-browser-check", "--hide-scrollbars", "--remote-debugging-pipe"),
)
KEYS = {
    "Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " "), "Home": (36, ""), "End": (35, ""),
    "ArrowLeft": (37, ""), "ArrowUp": (38, ""), "ArrowRight": (39, ""), "ArrowDown": (40, ""),
}  # fmt: skip


def find_executable() -> str:
    """Find Chromium; without it the test is skipped, or fails where TESTS_BROWSER=required."""
    found = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    if found:
        return found
    message = "no Chromium is installed (Debian: apt-get install chromium)"
    if os.environ.get("TESTS_BROWSER") == "required":
        pytest.fail(message)
    pytest.skip(message)


def _open_pipe() -> tuple[int, int]:
    """Open a pipe with descriptors other than 3 and 4, which become the browser's."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, DESCRIPTOR_MIN) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


class Chromium:
    """Browser with one page; `events` are all that it reported, oldest first."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="warmline-chromium-", ignore_cleanup_errors=True)
        self.events: list[dict[str, Any]] = []
        self.reactions: dict[str, Callable[[Any], object]] = {}  # by method; called as its events come
        self._buffer = b""
        self._number = 0
        reads, self._to = _open_pipe()
        self._from, writes = _open_pipe()
        command = [find_executable(), *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        shell = f'exec "$@" 3<&{reads} 4>&{writes} {reads}<&- {writes}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", *command],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._session = ""
        (target,) = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attach = {"targetId": target["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **attach)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    # ---- the protocol

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method and wait for its result; AssertionError if the browser refuses."""
        number = self.send(method, **parameters)
        while (answer := self._read_message()).get("id") != number:
            self.events.append(answer)
            if react := self.reactions.get(answer.get("method", "")):
                react(answer["params"])
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def send(self, method: str, **parameters: Any) -> int:
        """Send a call without waiting; the number of its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return self._number

    def _read_message(self) -> Any:
        limit = time.monotonic() + WAIT_S
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._from], [], [], limit - time.monotonic())
            assert readable, "the browser says nothing"
            self._buffer += (data := os.read(self._from, READ_BYTES))
            assert data, "the browser has ended"
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    # ---- the page

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    @contextmanager
    def given_password(self, password: str) -> Iterator[list[str]]:
        """Answer each request for a password; yields the URLs that asked."""
        urls: list[str] = []

        def answer(event: Any) -> None:
            urls.append(event["request"]["url"])
            response = {"response": "ProvideCredentials", "username": "owner", "password": password}
            self.send("Fetch.continueWithAuth", requestId=event["requestId"], authChallengeResponse=response)

        def go_on(event: Any) -> None:
            self.send("Fetch.continueRequest", requestId=event["requestId"])

        self.reactions = {"Fetch.authRequired": answer, "Fetch.requestPaused": go_on}
        self.call("Fetch.enable", handleAuthRequests=True)
        yield urls
        self.call("Fetch.disable")
        self.reactions = {}

    def run(self, script: str) -> Any:
        """Run an expression in the page and await its value; AssertionError with what it throws."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true in the page, evaluated every 15 ms; its value."""
        script = f"""new Promise((resolve, reject) => {{
            const limit = performance.now() + {WAIT_S * 1000 - 2000};
            const look = () => {{
                let value = false;
                try {{ value = ({condition}); }} catch {{ }}
                if (value) resolve(value);
                else if (performance.now() > limit) reject(new Error("never true: " + {json.dumps(condition)}));
                else setTimeout(look, 15);
            }};
            look();
        }})"""
        return self.run(script)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key; `key` is a name in KEYS or a character."""
        code, text = KEYS.get(key, (ord(key[0].upper()), key))
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def set_viewport(self, width: int, height: int, *, scheme: str = "light", motion: str = "no-preference") -> None:
        """Set the window's size, and the preferred color scheme and motion."""
        mobile = width < 500
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def save_screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    # ---- what it did

    def list_events(self, method: str) -> list[Any]:
        self.run("0")  # all that came before its answer is in `events` then
        return [event["params"] for event in self.events if event.get("method") == method]

    def list_requested_urls(self) -> list[str]:
        """List the URLs of all requests."""
        return [each["request"]["url"] for each in self.list_events("Network.requestWillBeSent")]

    def list_problems(self) -> list[str]:
        """List errors and warnings of the console, and uncaught exceptions."""
        logged = [
            str(each["entry"])
            for each in self.list_events("Log.entryAdded")
            if each["entry"]["level"] in ("error", "warning")
        ]
        printed = [
            str(each) for each in self.list_events("Runtime.consoleAPICalled") if each["type"] in ("error", "warning")
        ]
        return logged + printed + [str(each) for each in self.list_events("Runtime.exceptionThrown")]
