"""No mouse, a slow network, very long answers, a node that freezes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from cluster import Cluster, cluster
from exported_chats import exported
from playwright.async_api import Browser, CDPSession, Page, expect
from tinychat_page import IN_BROWSER, answered, ask, read_in, said, watched

pytestmark = IN_BROWSER

LONG_ANSWER_S = 5.0
"""Many times what the page's own thread takes for one."""


async def test_without_a_mouse(page: Page) -> None:
    """The focus is where one writes; everything else is reached by Tab, and seen to be."""
    await expect(page.locator("#input")).to_be_focused()
    await page.keyboard.type("hello")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("there")
    await page.keyboard.press("Enter")
    await expect(page.locator(".user .body")).to_have_text("hello\nthere")
    await said(page)
    await page.keyboard.press("Escape")
    await expect(page.locator("#send")).to_be_visible()
    await expect(page.locator("#input")).to_be_focused()
    reached = set()
    for _ in range(60):
        await page.keyboard.press("Shift+Tab")
        focused = page.locator(":focus")
        if not await focused.count():
            continue  # the browser's own
        outline = await focused.evaluate(
            "e => { const s = getComputedStyle(e); return s.outlineStyle + s.boxShadow }"
        )
        assert outline != "nonenone", await focused.evaluate("e => e.outerHTML")
        reached.add(await focused.evaluate("e => e.id || e.textContent"))
        if "clear" in reached:
            break
    wanted = {"Again", "Go on", "Edit", "model", "models", "cluster", "settings", "search", "clear"}
    assert wanted <= reached
    await page.keyboard.press("Enter")  # on "New chat"
    await expect(page.locator(".message")).to_have_count(0)
    await expect(page.locator("#input")).to_be_focused()


async def test_what_is_exported_is_read_again(page: Page) -> None:
    await answered(page, "about apples")
    async with page.expect_download() as begun:
        await page.click("#export")
    data = Path(await (await begun.value).path()).read_bytes()
    [kept] = json.loads(data)["conversations"]
    assert [one["role"] for one in kept["messages"].values()] == ["user", "assistant"]
    page.once("dialog", lambda dialog: dialog.accept())
    await page.hover("#list li")
    await page.click("#list [title=delete]")
    await expect(page.locator("#list li")).to_have_count(0)
    await read_in(page, data)
    await expect(page.locator("#list .title")).to_have_text(["about apples"])
    await page.click("#list .title")
    await expect(page.locator(".user .body")).to_have_text("about apples")


async def test_over_a_slow_network(c: Cluster, browser: Browser) -> None:
    """A phone with one bar: 400 ms there and back, 50 KB a second."""
    async with await browser.new_context() as context:
        page = await context.new_page()
        complaints = watched(page)
        network = await context.new_cdp_session(page)
        slow = {"offline": False, "latency": 400, "downloadThroughput": 50e3}
        await network.send("Network.emulateNetworkConditions", slow | {"uploadThroughput": 50e3})
        await page.goto(c.nodes["n1"].url, wait_until="commit")
        await expect(page.locator("#welcome")).to_be_visible(timeout=20_000)
        await expect(page.locator("#cluster")).to_contain_text("dummy ready", timeout=30_000)
        await page.select_option("#model", "dummy")
        await ask(page, "hello")
        await said(page)
        await page.click("#stop")
        await expect(page.locator("#send")).to_be_visible()
        await expect(page.locator(".assistant")).to_contain_text("stopped")
        assert complaints == []


async def _thread_seconds(devtools: CDPSession) -> float:
    """Processor time the page's own thread has taken, whatever else the machine does."""
    metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "TaskDuration")


async def test_an_answer_of_fifty_thousand_tokens(page: Page) -> None:
    """Ten times the answer is about ten times the work, not a hundred; and the page answers."""
    paragraph = "Some *words* and `code`, one after the other, a line of them and more. " * 4
    block = f"{paragraph}\n\n```python\ndef f(x):\n    return x + 1\n```\n\n- one\n- two\n\n"
    blocks = (60, 600)
    texts = ["# Long\n\n" + block * count for count in blocks]
    assert len(texts[-1].split()) > 30_000  # about 50,000 tokens
    await read_in(page, exported(*texts))
    await expect(page.locator("#list .title")).to_have_count(2)
    devtools = await page.context.new_cdp_session(page)
    await devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    taken = []
    for number, count in enumerate(blocks):
        began = await _thread_seconds(devtools)
        await page.click(f"#list .title:text-is('t{number}')")
        await expect(page.locator(".assistant pre")).to_have_count(count, timeout=60_000)
        taken.append(await _thread_seconds(devtools) - began)
    assert taken[1] < LONG_ANSWER_S
    assert taken[1] < 30 * taken[0]
    began = await _thread_seconds(devtools)
    await page.fill("#input", "more")  # the page answers to what people do
    await expect(page.locator("#input")).to_have_value("more")
    assert await _thread_seconds(devtools) - began < LONG_ANSWER_S


async def test_a_node_that_freezes_is_shown_lost_and_comes_back(
    tmp_path: Path, browser: Browser
) -> None:
    async with cluster(tmp_path) as c, await browser.new_page() as page:
        for name in ("n0", "n1"):
            c.add(name, "--memory", "1GB")
        await c.together()
        await page.goto(c.nodes["n1"].url)
        await page.click("#cluster")
        await expect(page.locator("#cluster")).to_contain_text("2 nodes")
        c.nodes["n0"].send(signal.SIGSTOP)
        row = page.locator("#picture .machine", has_text="n0")
        await expect(row).to_contain_text(re.compile("missed its heartbeat|cannot be reached"))
        c.nodes["n0"].send(signal.SIGCONT)
        await expect(row).to_have_class(re.compile("alive"), timeout=20_000)
        await expect(page.locator("#cluster")).to_contain_text("2 nodes", timeout=20_000)
