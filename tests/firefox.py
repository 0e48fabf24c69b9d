"""Firefox as Debian ships it, driven over WebDriver BiDi: https://www.w3.org/TR/webdriver-bidi/.

Playwright drives a Firefox of its own build only, and Selenium wants geckodriver, which Debian has
not; the protocol itself is JSON over one WebSocket.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

FIREFOX = os.environ.get("FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox")

START_S, ANSWER_S, LOOK_S = 60.0, 20.0, 0.05
_LISTENS = re.compile(rb"WebDriver BiDi listening on (ws://\S+)")

# Nothing leaves loopback: no updates, no telemetry, no lists of bad sites.
_SETTINGS: dict[str, object] = {
    "app.normandy.enabled": False,
    "app.update.enabled": False,
    "browser.safebrowsing.downloads.enabled": False,
    "browser.safebrowsing.malware.enabled": False,
    "browser.safebrowsing.phishing.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "extensions.update.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "network.dns.disablePrefetch": True,
    "security.sandbox.content.level": 0,  # root's has none to drop to
    "toolkit.telemetry.reportingpolicy.firstRun": False,
}


class FirefoxFailed(Exception):
    """What the browser said of a command."""


class Firefox:
    """One tab. `complaints` are the page's errors: exceptions, refused loads, broken policies."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tab = ""
        self.complaints: list[str] = []

    async def begin(self) -> None:
        await self._ask("session.new", capabilities={})
        await self._ask("session.subscribe", events=["log.entryAdded"])
        tree = await self._ask("browsingContext.getTree")
        self._tab = tree["contexts"][0]["context"]

    async def listen(self) -> None:
        """Until the browser is gone."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said.get("method") == "log.entryAdded" and said["params"]["level"] == "error":
                self.complaints.append(str(said["params"]["text"]))

    async def goto(self, url: str) -> None:
        await self._ask("browsingContext.navigate", context=self._tab, url=url, wait="complete")

    async def reload(self) -> None:
        await self._ask("browsingContext.reload", context=self._tab, wait="complete")

    async def run(self, function: str, *given: object) -> Any:
        """What an async function of JavaScript gives, called with `given`: JSON both ways."""
        source = f"async () => JSON.stringify(await ({function})(...{json.dumps(given)}))"
        done = await self._ask(
            "script.callFunction",
            functionDeclaration=source,
            awaitPromise=True,
            target={"context": self._tab},
        )
        if done["type"] == "exception":
            raise FirefoxFailed(done["exceptionDetails"]["text"])
        return json.loads(done["result"].get("value", "null"))

    async def text(self, selector: str) -> str:
        """Of the last element that fits and is seen; empty if there is none."""
        script = """(selector) => {
          const found = [...document.querySelectorAll(selector)];
          const last = found.findLast((one) => one.checkVisibility());
          return last?.innerText ?? last?.textContent ?? ""; // a formula has no inner text
        }"""
        return str(await self.run(script, selector))

    async def count(self, selector: str) -> int:
        return int(await self.run("(one) => document.querySelectorAll(one).length", selector))

    async def shows(self, selector: str, pattern: str) -> None:
        """Wait until the last such element's text has `pattern` in it."""
        deadline = time.monotonic() + ANSWER_S
        while not re.search(pattern, found := await self.text(selector), re.DOTALL):
            assert time.monotonic() < deadline, f"{selector} shows {found!r}, not {pattern!r}"
            await asyncio.sleep(LOOK_S)

    async def click(self, selector: str) -> None:
        """With the mouse, in the middle of it, once it is there and seen."""
        await self.shows(selector, "")
        where = """(selector) => {
          const one = [...document.querySelectorAll(selector)].findLast((e) => e.checkVisibility());
          one.scrollIntoView({ block: "nearest", behavior: "instant" });
          const { x, y, width, height } = one.getBoundingClientRect();
          return [Math.round(x + width / 2), Math.round(y + height / 2)];
        }"""
        x, y = await self.run(where, selector)
        moves = [
            {"type": "pointerMove", "x": x, "y": y},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        pointer = {"type": "pointer", "id": "mouse", "actions": moves}
        await self._ask("input.performActions", context=self._tab, actions=[pointer])

    async def press(self, text: str) -> None:
        """These keys, one after the other, wherever the focus is; `\\n` is Enter."""
        keys = [
            {"type": kind, "value": "\ue007" if letter == "\n" else letter}
            for letter in text
            for kind in ("keyDown", "keyUp")
        ]
        keyboard = {"type": "key", "id": "keyboard", "actions": keys}
        await self._ask("input.performActions", context=self._tab, actions=[keyboard])

    async def give_file(self, selector: str, file: Path) -> None:
        """Choose a file, as in the dialog of an input."""
        found = await self._ask(
            "browsingContext.locateNodes",
            context=self._tab,
            locator={"type": "css", "value": selector},
        )
        element = {"sharedId": found["nodes"][0]["sharedId"]}
        await self._ask("input.setFiles", context=self._tab, element=element, files=[str(file)])

    async def _ask(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(START_S):
            said = await self._answers[number]
        if said["type"] == "error":
            raise FirefoxFailed(f"{method}: {said['error']}: {said['message']}")
        return dict(said["result"])


@contextlib.asynccontextmanager
async def firefox(profile: Path) -> AsyncIterator[Firefox]:
    """A browser with a new profile in this folder; it ends with the block."""
    assert FIREFOX is not None
    profile.mkdir()
    lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});\n" for k, v in _SETTINGS.items()]
    (profile / "user.js").write_text("".join(lines))
    process = await asyncio.create_subprocess_exec(
        FIREFOX,
        "--headless",
        "--remote-debugging-port=0",
        "--no-remote",
        f"--profile={profile}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile), "MOZ_CRASHREPORTER_DISABLE": "1"},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(START_S):
            url = await _address(process.stderr)
        reading = asyncio.create_task(_read_all(process.stderr))  # or it would block on a full pipe
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{url}/session", max_msg_size=1 << 28) as socket,
        ):
            found = Firefox(socket)
            listening = asyncio.create_task(found.listen())
            try:
                await found.begin()
                yield found
            finally:
                listening.cancel()
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


async def _address(lines: asyncio.StreamReader) -> str:
    said = b""
    async for line in lines:
        said += line
        if found := _LISTENS.search(line):
            return found[1].decode()
    raise FirefoxFailed(f"it ended: {said.decode(errors='replace')[-2000:]}")


async def _read_all(lines: asyncio.StreamReader) -> None:
    while await lines.read(1 << 16):
        pass
