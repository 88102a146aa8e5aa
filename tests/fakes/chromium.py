"""Debian's Chromium without a window, driven over the DevTools protocol: one page, its script and its log."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

BINARY = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-port=0", "--window-size=1280,900",
)  # fmt: skip
LIMIT_S = 30.0

needs_chromium = pytest.mark.skipif(
    BINARY is None, reason="needs Chromium: apt-get install --no-install-recommends chromium"
)


class Page:
    """One tab. ``problems`` are its errors: uncaught exceptions and what the browser logs, refusals of the
    content security policy among them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self.problems: list[str] = []

    async def listen(self) -> None:
        """Take in what the browser says, until it leaves."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; its result."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, LIMIT_S)
        assert "result" in said, said
        result: dict[str, Any] = said["result"]
        return result

    async def go_to(self, url: str) -> None:
        """Load ``url``, anew if it is the one shown."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), LIMIT_S)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression of the page's."""
        said = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until the expression is true."""
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while not await self.evaluate(condition):
            assert asyncio.get_running_loop().time() < deadline, (condition, self.problems)
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        """What is to be read in the first element that ``selector`` finds."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def press(self, key: str) -> None:
        """A key of the keyboard: Tab, Enter or Escape."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window's size in CSS pixels, and which colours the system prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@asynccontextmanager
async def chromium(url: str) -> AsyncIterator[Page]:
    """A browser with a fresh profile that has gone to ``url``; ended afterwards with all its processes."""
    assert BINARY is not None
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    process = await asyncio.create_subprocess_exec(
        *(BINARY, *FLAGS, f"--user-data-dir={folder.name}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port(Path(folder.name, "DevToolsActivePort"), process)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(one for one in await answer.json() if one["type"] == "page")
            async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.go_to(url)
                yield page
                listening.cancel()
    finally:
        os.killpg(process.pid, 9)
        await process.wait()
        folder.cleanup()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not (said := _read(file)):
        assert process.returncode is None, f"{BINARY} does not start (exit code {process.returncode})"
        assert asyncio.get_running_loop().time() < deadline, f"{BINARY} opens no DevTools port"
        await asyncio.sleep(0.05)
    return int(said.split()[0])


def _read(file: Path) -> str:
    """What is in ``file`` once its first line is whole."""
    text = file.read_text() if file.exists() else ""
    return text if "\n" in text else ""
