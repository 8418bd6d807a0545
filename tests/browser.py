"""Chromium without a window for tests, spoken to by its DevTools protocol over two pipes.

Needs Chromium on the machine and no package. Knows nothing of the pages.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank"),
)
_PATIENCE = 30.0


def find_browser() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page, ended by its own process id."""

    def __init__(self, program: str, profile: Path) -> None:
        """profile: a fresh, empty folder."""
        commands_in, self._commands = os.pipe()
        self._answers, answers_out = os.pipe()
        # The protocol's pipes are the file descriptors 3 and 4 of the browser.
        script = f'exec "$@" 3<&{commands_in} 4>&{answers_out}'
        command = [program, *_FLAGS[:-1], f"--user-data-dir={profile}", _FLAGS[-1]]
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(commands_in, answers_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_in)
        os.close(answers_out)
        self._numbers = itertools.count(1)
        self._held = b""
        self.console: list[str] = []
        targets = self._send("Target.getTargets", {})["targetInfos"]
        target = next(entry["targetId"] for entry in targets if entry["type"] == "page")
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol for the page."""
        return self._send(method, params, self._session)

    def _send(
        self, method: str, params: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _receive(self, what: str) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._answers], [], [], _PATIENCE)
            assert ready, f"the browser does not answer to {what}"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._held += more
        one, _, self._held = self._held.partition(b"\0")
        return json.loads(one)

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what a developer would see in the console as a mistake."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.console.append(event["params"]["entry"]["text"])

    def go(self, url: str) -> None:
        """Load a page and wait until it stands."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = _PATIENCE) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"waited {seconds} s for {expression}"
            time.sleep(0.05)

    def fill(self, selector: str, text: str) -> None:
        """Put a text into a field as a user would: select all, then type."""
        self.evaluate(f"document.querySelector({selector!r}).select()")
        self.evaluate(f"document.querySelector({selector!r}).focus()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.press("Delete")

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key by its name, such as ArrowRight; 2 as modifier is Ctrl."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "Delete": 46, "Home": 36, "End": 35}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                modifiers=modifiers,
                windowsVirtualKeyCode=codes[key],
            )

    def point_at(self, selector: str) -> None:
        """Move the pointer over an element, once it has been scrolled into sight."""
        where = self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r});"
            " e.scrollIntoView({block: 'center'}); const b = e.getClientRects()[0];"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        self._mouse("mouseMoved", where)

    def click(self, selector: str) -> None:
        """Click an element."""
        self.point_at(selector)
        where = self.evaluate(
            f"(() => {{ const b = document.querySelector({selector!r}).getClientRects()[0];"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, where, button="left", clickCount=1)

    def _mouse(self, kind: str, where: list[float], **options: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], **options)

    def set_scheme(self, scheme: str) -> None:
        """light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, width: int = 1200, whole: bool = True) -> None:
        """A picture of the page, or of the part that shows."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        try:
            self._send("Browser.close", {})
            self.process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._commands)
        os.close(self._answers)
