"""A headless Chromium, driven over a pipe: what a page draws, asks for and complains about."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 600
# a page is told of a change of the window before its next frame, and plots are drawn anew a tenth
# of a second later: of timers the one that is due first runs first, however late
_DRAWN = """new Promise(done => requestAnimationFrame(() => setTimeout(
  () => requestAnimationFrame(() => setTimeout(done, 0)), 200)))"""


def executable() -> str | None:
    """The path of a browser on this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. `events` holds what the browser has told since the last `open`."""

    def __init__(self, path: str, profile: Path) -> None:
        # the browser reads commands from descriptor 3 and writes answers to 4, each ends with a 0
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [
            path,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            got = os.read(self._in, 1 << 20) if ready else b""
            assert got, f"the browser said nothing for {SECONDS} s, or has ended"
            self._unread += got
        text, _, self._unread = self._unread.partition(b"\0")
        return json.loads(text)

    def open(self, page: Path, *, width: int = 1280) -> None:
        """Loads a file, in the light scheme, and waits until it is drawn."""
        self.scheme("light")
        self.resize(width)
        self.events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        self.evaluate(_DRAWN)

    def resize(self, width: int, height: int = 900) -> None:
        """A window of this width, a phone's below 600."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.evaluate(_DRAWN)

    def scheme(self, name: str) -> None:
        """The system's scheme of colours, light or dark."""
        scheme = {"name": "prefers-color-scheme", "value": name}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of the page's script; promises are waited for."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value of an expression as soon as it is one that counts as true."""
        until = time.monotonic() + SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < until, f"not within {SECONDS} s: {expression}"
            time.sleep(0.01)
        return value

    def press(self, *keys: str) -> None:
        """Keys by their names, down and up."""
        for key in keys:
            code = {"Tab": 9, "Enter": 13, "ArrowDown": 40}[key]
            names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            typed = {"text": "\r"} if key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **names, **typed)
            self.send("Input.dispatchKeyEvent", type="keyUp", **names)

    def requested(self) -> list[str]:
        """Addresses that the page asked for, itself and what it holds apart."""
        asked = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        addresses = [params["request"]["url"] for params in asked]
        return [url for url in addresses[1:] if not url.startswith(("data:", "blob:"))]

    def complaints(self) -> list[str]:
        """Errors of scripts, and what the console was told."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in kinds]
