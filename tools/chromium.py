"""Headless Chromium, driven by the DevTools protocol over a pipe: no library, no open port.

with browser() as open_tab:
    tab = open_tab("http://127.0.0.1:11556/", width=1280, height=800)
    tab.until("document.querySelector('h1')")
    tab.picture(path)
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# The browser reads commands from one descriptor and writes answers to the other.
READS, WRITES = 3, 4
SECONDS = 15.0


def installed() -> bool:
    """Return whether Chromium is installed."""
    return shutil.which("chromium") is not None


class BrowserError(AssertionError):
    """The page failed, or did not reach the expected state."""


class _Pipe:
    """The pipe to the browser: commands, answers and events."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._number = to, back, b"", 0
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Execute a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._back, 2**20) if ready else b""
            if not part:
                raise BrowserError("the browser does not answer")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)


class Tab:
    """A page of the browser."""

    def __init__(self, pipe: _Pipe, session: str, context: str) -> None:
        self._pipe, self._session, self._context = pipe, session, context

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Execute a command of the DevTools protocol."""
        return self._pipe.ask(method, self._session, **params)

    def js(self, expression: str) -> Any:
        """Return the value of an expression in the page as JSON; wait for promises."""
        answer = self.do(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = SECONDS) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while True:
            body = f"const value = {expression}; return value instanceof Node || (value ?? null);"
            value = self.js(f"(() => {{ {body} }})()")
            if value:
                return value
            if time.monotonic() > end:
                text = self.js("document.body.innerText")
                raise BrowserError(f"never true: {expression}\n{text}\n{self.failures()}")
            time.sleep(0.03)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        place = self.until(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "if (!one) return null; one.scrollIntoView({block: 'nearest'});"
            "const at = one.getClientRects()[0];"
            "return at && [at.left + at.width / 2, at.top + at.height / 2]; })()"
        )
        at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, **at)

    def hover(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.do("Input.insertText", text=text)

    def press(self, key: str, code: int = 0, modifiers: int = 0) -> None:
        """Press a key by its DOM name."""
        text = {"Enter": "\r", "Tab": "\t"}.get(key)
        more = {"text": text} if text is not None and not modifiers else {}
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.do("Input.dispatchKeyEvent", type="keyDown", **fields, **more)
        self.do("Input.dispatchKeyEvent", type="keyUp", **fields)

    def upload(self, selector: str, *paths: str | Path) -> None:
        """Select files in an `<input type="file">`."""
        found = self.do("Runtime.evaluate", expression=f"document.querySelector({selector!r})")
        files = [str(path) for path in paths]
        self.do("DOM.setFileInputFiles", objectId=found["result"]["objectId"], files=files)

    def downloads_to(self, folder: Path) -> None:
        """Write the downloads of the page into a folder."""
        self._pipe.ask(
            "Browser.setDownloadBehavior",
            behavior="allow",
            downloadPath=str(folder),
            browserContextId=self._context,
        )

    def theme(self, scheme: str) -> None:
        """Set the color scheme of the system: `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.do("Emulation.setEmulatedMedia", features=[feature])

    def failures(self) -> list[str]:
        """Return exceptions, errors and policy violations of the page."""
        self.js("0")
        found = []
        for event in self._pipe.events:
            if event.get("sessionId") != self._session:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
        return found

    def picture(self, path: str | Path) -> None:
        """Write a screenshot as PNG."""
        data = self.do("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Callable[..., Tab]]:
    """Run a browser, and yield a function that opens a tab at a URL."""
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # A shell connects the pipe to the descriptors that the protocol requires.
        line = f'exec chromium "$@" {READS}<&{to_read} {WRITES}>&{back_write}'
        process = subprocess.Popen(
            ["bash", "-c", line, "chromium", *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_read, back_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(back_write)
        pipe = _Pipe(to_write, back_read)

        def open_tab(url: str, *, width: int = 1280, height: int = 800, scale: int = 1) -> Tab:
            # A separate context, so that tabs share no state.
            context = pipe.ask("Target.createBrowserContext")["browserContextId"]
            target = pipe.ask("Target.createTarget", url="about:blank", browserContextId=context)
            attached = pipe.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            tab = Tab(pipe, attached["sessionId"], context)
            for domain in ("Page", "Runtime", "Log"):
                tab.do(f"{domain}.enable")
            tab.do(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=scale,
                mobile=width < 600,
            )
            tab.do("Page.navigate", url=url)
            tab.until("document.readyState === 'complete' && location.href !== 'about:blank'")
            return tab

        try:
            yield open_tab
        finally:
            os.close(to_write)
            os.close(back_read)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
