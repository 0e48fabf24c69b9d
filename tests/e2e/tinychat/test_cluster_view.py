"""The cluster as a picture, while nodes come and go and bring models."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import zoo
from cluster import cluster
from hub_server import HubServer
from playwright.async_api import Browser, Page, expect
from tinychat_page import IN_BROWSER, ask, watched

pytestmark = IN_BROWSER


async def test_the_ring_is_drawn(page: Page) -> None:
    await page.click("#cluster")
    await expect(page.locator("#picture svg .arc")).to_have_count(2)
    await expect(page.locator("#picture .machine")).to_have_count(2)
    await expect(page.locator("#picture")).to_contain_text("layers 0 to")
    await expect(page.locator("#picture svg .moving")).to_have_count(0)
    await ask(page, "hello")
    await expect(page.locator("#picture svg .moving")).to_have_count(1)
    links = page.locator("#picture svg .link")
    await expect(links).to_have_text([re.compile(r"[\d.]+ ms · [\d.]+ KB/s")] * 2)
    await page.click("#stop")
    await expect(page.locator("#picture svg .moving")).to_have_count(0)
    await page.click("#cluster")
    await expect(page.locator("#picture")).to_be_hidden()


async def test_nodes_come_and_go_and_the_page_comes_back(tmp_path: Path, browser: Browser) -> None:
    async with cluster(tmp_path) as c, await browser.new_page() as page:
        for name in ("n0", "n1"):
            c.add(name, "--memory", "1GB")
        await c.together()
        complaints = watched(page)
        await page.goto(c.nodes["n1"].url)
        await page.click("#cluster")
        rows = page.locator("#picture .machine")
        await expect(rows).to_have_count(2)
        c.add("n2", "--memory", "1GB")
        await expect(rows).to_have_count(3, timeout=20_000)
        await expect(page.locator("#cluster")).to_contain_text("3 nodes")
        c.nodes["n2"].send(signal.SIGTERM)
        await expect(rows).to_have_count(2, timeout=20_000)
        c.nodes["n1"].kill()  # that the page is from
        await expect(page.locator("#cluster")).to_have_text("this node does not answer")
        c.nodes["n1"].start()
        await expect(page.locator("#cluster")).to_contain_text("2 nodes", timeout=30_000)
        assert complaints == []


async def test_a_node_is_looked_into_and_drained(page: Page) -> None:
    await page.click("#cluster")
    n0 = page.locator(".machine", has=page.get_by_role("button", name="n0", exact=True))
    await n0.get_by_role("button", name="n0").click()
    await expect(n0.locator(".more")).to_contain_text("round trip")
    await expect(n0.locator(".more")).to_contain_text("no models on its disk")
    await expect(n0.locator(".log")).to_contain_text("node n0 listens on")
    await n0.get_by_role("button", name="Drain").click()
    await expect(n0).to_contain_text("drained")
    await expect(page.locator("#picture svg .arc")).to_have_count(1, timeout=20_000)
    await n0.get_by_role("button", name="Use again").click()
    await expect(page.locator("#picture svg .arc")).to_have_count(2, timeout=20_000)
    await expect(n0).not_to_contain_text("drained")


async def test_the_last_minutes_are_plotted(page: Page) -> None:
    await page.click("#cluster")
    await expect(page.locator("#picture .history path")).to_have_count(2)
    await ask(page, "hello")
    await expect(page.locator(".history figcaption").first).not_to_have_text(
        re.compile("at most 0 tok/s"), timeout=20_000
    )
    await expect(page.locator(".history figcaption").last).to_contain_text("Memory in use")


async def test_a_first_chat_shows_a_bar_for_each_node(tmp_path: Path, browser: Browser) -> None:
    repo = "mlx-community/Qwen3-0.6B-4bit"  # a name in the registry; here it is a tiny model
    folder = tmp_path / "tiny"
    zoo.write_checkpoint("llama", folder)
    zoo.write_tokenizer(folder)
    files = {f.name: f.read_bytes() for f in folder.iterdir()}
    files["vocabulary.model"] = bytes(40 << 20)
    with HubServer() as server:
        server.put(repo, files)
        server.rate = 2e5
        async with cluster(tmp_path) as c, await browser.new_page() as page:
            for name in ("n0", "n1"):
                c.add(
                    name,
                    engine="cpu",
                    EXO_HOME=str(tmp_path / f"home-{name}"),
                    HF_HUB_CACHE=str(tmp_path / f"cache-{name}"),
                    HF_ENDPOINT=server.url,
                    HF_HUB_OFFLINE="0",
                )
            await c.together()
            await page.goto(c.nodes["n1"].url)
            await page.select_option("#model", "qwen3-0.6b")
            await ask(page, "word1 word2")
            bars = page.locator(".assistant .node")
            await expect(bars).to_have_count(2, timeout=15000)
            for name in ("n0", "n1"):
                mine = bars.filter(has_text=f"{name}: downloading")
                await expect(mine).to_contain_text("of 4", timeout=15000)
            server.rate = None
            await expect(bars).to_have_count(0, timeout=30000)
            await expect(page.locator(".assistant .error")).to_have_count(0)
