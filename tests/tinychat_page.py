"""tinychat as somebody uses it: Chromium, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil

import pytest
from playwright.async_api import Page, expect

_BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), None)
"""The shell draws and runs as the others do, without a browser's own windows and services: a third
of their processor time."""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

EXPECTED = re.compile(
    "status of (400|404|502)|requires 'TrustedHTML'"
    "|net::ERR_(CONNECTION_REFUSED|CONNECTION_RESET|INCOMPLETE_CHUNKED_ENCODING)"
)
"""What the browser says of what a test does on purpose."""

IN_BROWSER = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.asyncio(loop_scope="session"),  # that of the browser, which all tests share
]


def watched(page: Page) -> list[str]:
    """What the page complains of from now on."""
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        # A refused request is logged by the browser itself; the page shows it.
        lambda m: (
            complaints.append(m.text) if m.type == "error" and not EXPECTED.search(m.text) else None
        ),
    )
    return complaints


async def ask(page: Page, text: str) -> None:
    await page.fill("#input", text)
    await page.press("#input", "Enter")


async def said(page: Page, characters: int = 20) -> None:
    """Wait until the newest answer has as many. (The page's policy forbids what Playwright's own
    wait for a function does.)"""
    enough = re.compile(f".{{{characters}}}", re.DOTALL)
    await expect(page.locator(".assistant .body").last).to_have_text(enough, timeout=10_000)


async def answered(page: Page, text: str = "") -> None:
    """Ask, if there is a text, and wait until an answer was stopped after some of it."""
    if text:
        await ask(page, text)
    await said(page)
    await page.click("#stop")
    await expect(page.locator("#send")).to_be_visible()


async def read_in(page: Page, data: bytes) -> None:
    file = {"name": "chats.json", "mimeType": "application/json", "buffer": data}
    await page.set_input_files("#import", files=[file])  # type: ignore[list-item]
