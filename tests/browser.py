"""A real Chromium, driven over its DevTools protocol: what a person does with a page, and what they see.

async with Browser() as browser:
    page = await browser.open("file:///…/report.html")
    await page.click("#curves summary")
    assert await page.eval("document.title") == "…"
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
MISSING = "there is no Chromium on this machine: apt-get install chromium"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0", "--no-first-run",
    "--disable-background-networking", "--disable-extensions", "--disable-dev-shm-usage", "about:blank",
)  # fmt: skip
_PATIENCE = 60.0
"""Seconds for an answer of the browser: the machine may be busy."""
_UNTIL = """new Promise((done, failed) => {
  const late = setTimeout(() => failed(new Error("never true: " + %(text)s)), %(patience)d);
  const look = () => { const found = (%(condition)s); if (found) { clearTimeout(late); done(found); } else requestAnimationFrame(look); };
  look();
})"""  # noqa: E501


class Browser:
    """A Chromium with a profile of its own, ended with the block."""

    async def __aenter__(self) -> Self:
        assert CHROMIUM is not None, MISSING
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._process = await asyncio.create_subprocess_exec(
            CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile.name}", stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stderr is not None
        async with asyncio.timeout(_PATIENCE):
            async for line in self._process.stderr:
                if line.startswith(b"DevTools listening on "):
                    break
        self._drained = asyncio.create_task(self._process.stderr.read())  # a full pipe would stop it
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(line.split()[-1].decode(), max_msg_size=0)
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._hearing = asyncio.create_task(self._hear())
        return self

    async def __aexit__(self, *exception: object) -> None:
        with contextlib.suppress(Exception):
            await self.send("Browser.close")
        await self._socket.close()
        await self._session.close()
        await self._process.wait()
        await asyncio.gather(self._hearing, self._drained, return_exceptions=True)
        self._profile.cleanup()

    async def open(self, url: str, *, width: int = 1280, height: int = 900) -> Page:
        """A new page, when it has loaded."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            await page.send(f"{domain}.enable")
        await page.size(width, height)
        await page.go(url)
        return page

    async def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A command, and its answer.

        Raises:
            RuntimeError: the browser refuses.
        """
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        told = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(told if session is None else told | {"sessionId": session})
        async with asyncio.timeout(_PATIENCE):
            found = await answer
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        result: dict[str, Any] = found["result"]
        return result

    async def _hear(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if (waiting := self._answers.pop(told.get("id"), None)) is not None:
                if not waiting.done():
                    waiting.set_result(told)
            elif (page := self._pages.get(told.get("sessionId", ""))) is not None:
                page.heard(told["method"], told["params"])


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self._loaded = asyncio.Event()
        self.errors: list[str] = []
        """What its scripts failed with, and what the browser complained of."""

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to this page."""
        return await self._browser.send(method, self._session, **parameters)

    async def go(self, url: str) -> None:
        """Go to an address, until it has loaded."""
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(_PATIENCE):
            await self._loaded.wait()

    async def size(self, width: int, height: int) -> None:
        """Of the window, CSS pixels."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def media(self, *, dark: bool = False, still: bool = False) -> None:
        """What the reader's system prefers."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def eval(self, script: str) -> Any:
        """The value of an expression; a promise's, when it is there.

        Raises:
            AssertionError: it fails.
        """
        found = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    async def until(self, condition: str, patience: float = 15.0) -> Any:
        """Wait for an expression to be true, looked at with every frame that the page draws."""
        wait = _UNTIL % {"condition": condition, "text": json.dumps(condition), "patience": patience * 1000}
        return await self.eval(wait)

    async def drawn(self) -> None:
        """Until what is to be drawn is drawn."""
        frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        for _ in range(2):
            await self.eval(frame)

    async def click(self, selector: str) -> None:
        """By the mouse, in its middle.

        Raises:
            AssertionError: it is not to be seen, or something else lies above it.
        """
        found = f"document.querySelector({json.dumps(selector)})"
        x, y = await self.eval(
            f"(() => {{ const one = {found}; if (!one) throw new Error('there is no ' + {json.dumps(selector)});"
            " one.scrollIntoView({block: 'center', behavior: 'instant'}); const box = one.getBoundingClientRect();"
            " const x = box.x + box.width / 2, y = box.y + box.height / 2, top = document.elementFromPoint(x, y);"
            " if (!top || !(one.contains(top) || top.contains(one) || one.closest('label')?.contains(top)))"
            " throw new Error('it is covered: ' + one.outerHTML.slice(0, 80)); return [x, y]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def hover(self, x: float, y: float) -> None:
        """Move the mouse there."""
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def key(self, name: str, **more: Any) -> None:
        """Press a key such as "ArrowLeft" or "Tab"."""
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, **more)

    async def write(self, text: str) -> None:
        """Type into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def picture(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        data = base64.b64decode(found["data"])
        if path is not None:
            await asyncio.to_thread(path.write_bytes, data)
        return data

    async def close(self) -> None:
        """It is gone."""
        await self._browser.send("Target.closeTarget", targetId=self._target)

    def heard(self, event: str, told: dict[str, Any]) -> None:
        """An event of the browser's."""
        if event == "Page.loadEventFired":
            self._loaded.set()
        elif event == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
