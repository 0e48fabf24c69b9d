"""Every view in both themes and widths, and in the language a browser asks for."""

from __future__ import annotations

import json
from importlib.resources import files

from cluster import Cluster
from looks import compare
from playwright.async_api import Browser, Page, expect
from tinychat_page import IN_BROWSER, ask, said

pytestmark = IN_BROWSER

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")

ONE_PROCESSOR = """
const parse = JSON.parse;
JSON.parse = (text) => parse(text, (key, value) => (key === "chip" ? "AMD EPYC" : value));
"""
"""Pictures show a machine's processor, which is this one wherever they are taken."""


async def grave(page: Page) -> list[str]:
    """What axe finds that keeps people from using the page, and where."""
    await page.evaluate(AXE)
    found = await page.evaluate("axe.run()")
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


async def views(page: Page, name: str) -> dict[str, list[str]]:
    """What is grave in each view, which is shown in turn, and looks as it should."""

    async def shot(page: Page, view: str) -> None:
        compare(await page.screenshot(), f"{view}-{name}")

    wrong = {"welcome": await grave(page)}
    await shot(page, "welcome")
    await page.fill("#input", "/")
    await expect(page.locator("#commands button").first).to_be_visible()
    wrong["commands"] = await grave(page)
    await shot(page, "commands")
    await page.click("#settings")
    await page.fill("[name=max_tokens]", "100")
    await page.click("dialog .main")
    await ask(page, "hello **you**\n\n```python\nprint(1)\n```")
    await said(page, 5)
    await expect(page.locator("#send")).to_be_visible(timeout=60_000)
    wrong["chat"] = await grave(page)
    await shot(page, "chat")
    await page.click("#cluster")
    await page.locator("#picture .machine button").first.click()
    await expect(page.locator("#picture .more").first).to_be_visible()
    wrong["cluster"] = await grave(page)
    await shot(page, "cluster")
    await page.click("#cluster")
    await page.click("#settings")
    wrong["settings"] = await grave(page)
    await shot(page, "settings")
    await page.keyboard.press("Escape")
    await page.click("#models")
    await expect(page.locator("#here .choice").first).to_be_visible()
    wrong["models"] = await grave(page)
    await shot(page, "models")
    await page.keyboard.press("Escape")
    if await page.locator("#menu").is_visible():
        await page.click("#menu")
        wrong["list"] = await grave(page)
        await shot(page, "list")
    return {view: found for view, found in wrong.items() if found}


async def test_every_view_looks_right_and_axe_finds_nothing_serious(
    c: Cluster, browser: Browser
) -> None:
    """In no view, theme or width. (The check itself is a script that the page's policy forbids.)"""
    for theme, width in (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)):
        context = await browser.new_context(
            bypass_csp=True,
            color_scheme=theme,  # type: ignore[arg-type]
            viewport={"width": width, "height": 800},
            reduced_motion="reduce",
        )
        page = await context.new_page()
        await page.add_init_script(ONE_PROCESSOR)
        await page.goto(c.nodes["n1"].url)
        await page.select_option("#model", "dummy")
        wrong = await views(page, f"{theme}-{width}")
        assert not wrong, json.dumps(wrong, indent=2)
        await context.close()


async def test_it_speaks_what_the_browser_asks_for(c: Cluster, browser: Browser) -> None:
    for locale, language, begin, nodes in (
        ("de-AT", "de", "Neuer Chat", "2 Knoten"),
        ("zh-CN", "zh", "新对话", "2 个节点"),
        ("nl-NL", "en", "New chat", "2 nodes"),
    ):
        page = await browser.new_page(locale=locale)
        await page.goto(c.nodes["n1"].url)
        await expect(page.locator("html")).to_have_attribute("lang", language)
        await expect(page.locator("#clear")).to_have_text(begin)
        await expect(page.locator("#cluster")).to_contain_text(nodes)
        await page.close()


async def test_a_phone_has_the_list_behind_a_button(page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 800})
    await expect(page.locator("#list")).not_to_be_in_viewport()
    await page.click("#menu")
    await expect(page.locator("#search")).to_be_in_viewport()
    wide = "document.documentElement.scrollWidth"
    assert await page.evaluate(wide) <= 390
