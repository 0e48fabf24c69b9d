"""tinychat in a real browser: Chromium, driven by Playwright, against a real two-node cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zoo
from cluster import Cluster, cluster, until
from hub_server import HubServer
from playwright.async_api import Dialog, Page, async_playwright, expect
from thinker import write_thinker

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture
async def c(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as made:
        made.add("n0", "--memory", "2GB", EXO_DUMMY_FAULTS="delay=0.01")
        made.add("n1", "--memory", "1GB", EXO_DUMMY_FAULTS="delay=0.01")
        await made.together()
        await made.nodes["n0"].chat()  # so that the dummy is served, and listed
        yield made


@pytest.fixture
async def page(c: Cluster) -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            # A refused request is logged by the browser itself; the page shows it.
            lambda m: (
                complaints.append(m.text)
                if m.type == "error" and "status of 400" not in m.text
                else None
            ),
        )
        await page.goto(c.nodes["n1"].url)
        await page.select_option("#model", "dummy")
        yield page
        await browser.close()
        assert complaints == []


async def ask(page: Page, text: str) -> None:
    await page.fill("#input", text)
    await page.press("#input", "Enter")


async def test_it_shows_the_cluster_and_streams_an_answer(page: Page) -> None:
    await expect(page.locator("#cluster")).to_contain_text("2 nodes")
    await expect(page.locator("#cluster")).to_contain_text("dummy ready")
    await ask(page, "hello")
    await expect(page.locator(".user")).to_have_text("hello")
    await expect(page.locator("#stop")).to_be_visible()
    await page.wait_for_function(
        "document.querySelector('.assistant')?.textContent.length > 20", timeout=10_000
    )
    await page.click("#stop")
    await expect(page.locator("#send")).to_be_visible()
    await expect(page.locator(".assistant")).to_contain_text("stopped")


async def test_a_stop_frees_the_sequence(page: Page, c: Cluster) -> None:
    async def sequences(n: int) -> bool:
        status = (await c.nodes["n0"].get("/v1/topology"))["status"]
        return bool(status["sequences"] == n)

    await ask(page, "hello")
    await until(lambda: sequences(1), "the answer runs")
    await page.click("#stop")
    await until(lambda: sequences(0), "nothing runs any more", 5)


async def test_the_conversation_is_kept_and_can_be_begun_anew(page: Page) -> None:
    await ask(page, "first")
    await page.wait_for_function(
        "document.querySelector('.assistant')?.textContent.length > 20", timeout=10_000
    )
    await page.click("#stop")
    await expect(page.locator("#send")).to_be_visible()
    await page.reload()
    await expect(page.locator(".user")).to_have_text("first")
    await expect(page.locator(".assistant")).to_have_count(1)
    await page.click("#clear")
    await expect(page.locator(".message")).to_have_count(0)
    await expect(page.locator("#welcome")).to_be_visible()


async def test_markup_in_a_message_is_text(page: Page) -> None:
    await ask(page, "<img src=x onerror=alert(1)>")
    await expect(page.locator(".user")).to_have_text("<img src=x onerror=alert(1)>")
    await expect(page.locator(".user img")).to_have_count(0)
    await page.click("#stop")
    await expect(page.locator("#send")).to_be_visible()


async def test_an_error_is_shown_as_one(page: Page, c: Cluster) -> None:
    await ask(page, "x" * 5000)
    await expect(page.locator(".error")).to_contain_text("the context of dummy is 4096")


async def test_a_first_chat_shows_a_bar_for_each_node(tmp_path: Path) -> None:
    repo = "mlx-community/Qwen3-0.6B-4bit"  # a name in the registry; here it is a tiny model
    folder = tmp_path / "tiny"
    zoo.write_checkpoint("llama", folder)
    zoo.write_tokenizer(folder)
    files = {f.name: f.read_bytes() for f in folder.iterdir()}
    files["vocabulary.model"] = bytes(40 << 20)
    with HubServer() as server:
        server.put(repo, files)
        server.rate = 2e5
        async with cluster(tmp_path) as c, async_playwright() as playwright:
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
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = await browser.new_page()
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
            await browser.close()


async def test_thoughts_are_folded_and_a_key_is_asked_for_once(tmp_path: Path) -> None:
    thinker = str(write_thinker(tmp_path / "thinker"))
    async with cluster(tmp_path) as c:
        flags = ["--api-key", "sekret", "--max-generate-tokens", "40", "--threads", "1"]
        node = c.add("n0", *flags, engine="cpu")
        await until(node.answers, "it answers")
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = await browser.new_page()
            questions: list[str] = []

            async def answer(dialog: Dialog) -> None:
                questions.append(dialog.message)
                await dialog.accept("sekret")

            page.on("dialog", answer)
            # What is loaded is listed.
            loads = {"model": thinker, "prompt": "x", "max_tokens": 1}
            with_key = {"Authorization": "Bearer sekret"}
            url = f"{node.url}/v1/completions"
            assert (await page.request.post(url, headers=with_key, data=loads)).ok
            await page.goto(node.url)
            await expect(page.locator("#cluster")).to_contain_text("1 node")
            await page.select_option("#model", thinker)
            await ask(page, "hello")
            thoughts = page.locator("details.thoughts p")
            await expect(thoughts).not_to_be_empty(timeout=20_000)
            await expect(thoughts).not_to_be_visible()
            await page.click("details.thoughts summary")
            await expect(thoughts).to_be_visible()
            assert questions == ["This node wants an API key:"]
            await page.goto(f"{node.url}/docs")
            await expect(page.locator("details")).not_to_have_count(0)
            chat = page.locator("details", has_text="/v1/chat/completions")
            await chat.locator("summary").click()
            await expect(chat).to_contain_text("number from 0 to 2")
            await browser.close()
