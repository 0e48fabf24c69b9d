"""Models are found, placed, brought, loaded and deleted."""

from __future__ import annotations

from pathlib import Path

import zoo
from cluster import cluster
from hub_server import HubServer
from playwright.async_api import Browser, Page, expect
from tinychat_page import IN_BROWSER, ask, said

pytestmark = IN_BROWSER


async def test_models_are_found_loaded_placed_and_unloaded(page: Page) -> None:
    await page.click("#models")
    row = page.locator('.choice[data-model="smollm2-135m"]')
    await expect(row.locator(".badge")).to_have_text("fits here")
    huge = page.locator('.choice[data-model="deepseek-v3"]')
    await expect(huge.locator(".badge")).to_contain_text("too large by")
    await page.fill("#find", "smollm2 1.7")
    await expect(page.locator("#here .choice")).to_have_count(1)
    await expect(page.locator("#hub")).to_have_text("the hub cannot be asked from here")
    await page.fill("#find", "no such thing")
    await expect(page.locator("#here")).to_have_text("no model here has such a name")
    await page.fill("#find", "deepseek-v3")
    await huge.get_by_role("button", name="Where?").click()
    await expect(huge.locator(".bad").last).to_contain_text("HF_HUB_OFFLINE", timeout=20_000)
    await page.click("#catalog-close")
    await ask(page, "hello")
    await said(page)


async def test_a_model_of_the_hub_is_found_brought_loaded_and_deleted(
    tmp_path: Path, browser: Browser
) -> None:
    zoo.write_checkpoint("llama", tmp_path / "llama")
    zoo.write_tokenizer(tmp_path / "llama")
    files = {f.name: f.read_bytes() for f in (tmp_path / "llama").iterdir()}
    async with cluster(tmp_path) as c, await browser.new_page() as page:
        with HubServer() as hub:
            hub.put("org/tiny-llama", files)
            node = c.add_with_cache("a", hub.url)
            await c.together()
            await page.goto(node.url)
            await page.click("#models")
            await page.fill("#find", "tiny")
            found = page.locator('#hub .choice[data-model="org/tiny-llama"]')
            await expect(found).to_contain_text("fits here")
            await found.get_by_role("button", name="Download").click()
            row = page.locator('#here .choice[data-model="org/tiny-llama"]')
            await expect(row).to_contain_text("on a", timeout=20_000)
            await row.get_by_role("button", name="Where?").click()
            await expect(row).to_contain_text("a layers 0 to 5", timeout=20_000)
            await row.get_by_role("button", name="Load org").click()
            await expect(row.locator(".badge")).to_have_text("loaded", timeout=30_000)
            await row.get_by_role("button", name="Unload").click()
            await expect(row).to_contain_text("its memory is free", timeout=20_000)
            page.on("dialog", lambda dialog: dialog.accept())
            await row.get_by_role("button", name="Delete").click()
            await expect(row).to_have_count(0, timeout=20_000)
