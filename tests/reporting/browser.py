"""A real browser for tests: headless chromium, driven over the DevTools protocol through a pair of pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60.0  # seconds until an answer is given up


class Browser:
    """One page in one browser. `messages` are what its console, its log and its scripts' errors said, `requests` every
    address that it asked for."""

    def __init__(self, width: int = 1400, height: int = 1000) -> None:
        assert CHROMIUM is not None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._number, self._buffer = 0, b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--disable-background-networking", "--hide-scrollbars"]  # fmt: skip
        command = [CHROMIUM, *options, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"]
        # Chromium reads from descriptor 3 and writes to 4: a first process puts our pipes there, then becomes it.
        become = (
            "import os, sys; os.dup2(int(sys.argv[1]), 203); os.dup2(int(sys.argv[2]), 204); "
            "os.dup2(203, 3); os.dup2(204, 4); os.execv(sys.argv[3], sys.argv[3:])"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", become, str(to_read), str(to_write), *command, "--remote-debugging-pipe"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._write)
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> Any:
        """One command, and its result."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _next(self) -> Any:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._read, 1 << 20) if ready else b""
            assert piece, "the browser does not answer"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        name, what = event.get("method"), event.get("params", {})
        if name == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.messages.append(" ".join(str(part.get("value", part.get("description"))) for part in what["args"]))
        elif name == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(what["exceptionDetails"]))
        elif name == "Log.entryAdded":
            self.messages.append(json.dumps(what["entry"]))
        elif name == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of a script in the page; a promise's is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait for a script to have a value that counts."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never came true: {script}"
            time.sleep(0.05)
        return value

    def open(self, path: Path) -> None:
        """Open a report, and wait until all its figures are drawn."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.documentElement?.dataset.drawn")

    def click(self, selector: str) -> None:
        """A real click, with the mouse, on the first such element."""
        place = self.run(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{ block: "center", behavior: "instant" }});
              const box = element.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def figure(self, path: Path) -> None:
        """A figure of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))
