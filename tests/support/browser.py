"""Headless Chromium, driven over its DevTools protocol through pipes: a page on a phone or screen, light or dark."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--remote-debugging-pipe")


class Browser:
    """A page in headless Chromium. width, height: of the window, in CSS pixels."""

    def __init__(self, profile: Path, *, width: int, height: int, dark: bool) -> None:
        assert CHROMIUM
        (command_read, self._commands), (self._answers, answer_write) = os.pipe(), os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        words = ["bash", "-c", f'exec "$@" 3<&{command_read} 4>&{answer_write}', "bash", CHROMIUM, *_FLAGS]
        self._process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(command_read, answer_write),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._file = os.fdopen(self._answers, "rb")
        self._number, self._buffer, self._session = 0, b"", ""
        self.problems: list[str] = []  # exceptions and messages of errors on the page
        target = next(each for each in self._send("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self.requests: list[str] = []  # URLs that the page has loaded

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        self._file.close()

    def open(self, url: str, ready: str) -> None:
        """Opens a page, and waits until the JavaScript expression `ready` is true."""
        self._send("Page.navigate", url=url)
        end = time.monotonic() + 30
        while not self.evaluate(f"document.readyState === 'complete' && Boolean({ready})"):
            assert time.monotonic() < end, f"not ready: {ready}; {self.problems}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which must be a JSON value."""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def capture(self, path: Path) -> None:
        """Saves a picture of the whole page."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._answers, 1 << 20)
            assert block, "Chromium has ended"
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
