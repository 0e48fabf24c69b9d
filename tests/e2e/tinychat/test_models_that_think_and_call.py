"""Thoughts, calls of tools and keys, with a model that has a real template."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cluster import cluster, until
from playwright.async_api import Browser, Dialog, expect
from thinker import write_thinker
from tinychat_page import IN_BROWSER, ask

pytestmark = IN_BROWSER


async def test_thoughts_are_folded_and_a_key_is_asked_for_once(
    tmp_path: Path, browser: Browser
) -> None:
    thinker = str(write_thinker(tmp_path / "thinker"))
    async with cluster(tmp_path) as c:
        flags = ["--api-key", "sekret", "--max-generate-tokens", "40", "--threads", "1"]
        node = c.add("n0", *flags, engine="cpu")
        await until(node.answers, "it answers")
        async with await browser.new_page() as page:
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
            await page.goto(f"{node.url}/docs/guide")
            await expect(page.locator("h1")).to_have_text("Ten minutes' start")
            await page.click("main >> text=A cluster at home")  # a link from page to page
            await expect(page.locator("h1")).to_have_text("A cluster at home")
            await page.click("nav >> text=How it works")
            await page.click('main a:text("docs/decisions/")')
            await expect(page.locator("h1")).to_contain_text("cut by replacing layer classes")
            await page.goto(f"{node.url}/docs/guide#no-such")
            await expect(page.locator("main")).to_have_text("there is no page no-such")


async def test_tools_are_called_and_a_person_says_what_they_gave(
    tmp_path: Path, browser: Browser
) -> None:
    thinker = str(write_thinker(tmp_path / "thinker"))
    place = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}}}
    place["required"] = ["city"]
    weather = {"type": "function", "function": {"name": "weather", "parameters": place}}
    async with cluster(tmp_path) as c, await browser.new_page() as page:
        node = c.add("n0", "--threads", "1", engine="cpu")
        await until(node.answers, "it answers")
        await node.completion("x", thinker, max_tokens=1)  # what is loaded is listed
        await page.goto(node.url)
        await page.select_option("#model", thinker)
        await page.click("#settings")
        await page.fill("[name=tools]", "[1, 2")
        await page.click("dialog .main")
        await expect(page.locator("#how")).to_be_visible()  # they are not kept, and it says why
        await page.fill("[name=tools]", json.dumps([weather]))
        await page.check("[name=must_call]")
        await page.fill("[name=max_tokens]", "200")
        await page.fill("[name=max_reasoning_tokens]", "12")
        await page.click("dialog .main")
        await ask(page, "What is it like?")
        call = page.locator(".assistant .call")
        await expect(call.locator("summary")).to_have_text("Calls weather", timeout=20_000)
        await expect(call.locator("pre")).to_have_text(re.compile('"city": "(Bern|Rome)"'))
        await expect(page.locator("#send")).to_be_visible()  # it is kept
        await page.reload()
        await page.click("#settings")
        await page.fill("[name=max_tokens]", "20")
        await expect(page.locator("[name=must_call]")).to_be_checked()
        await page.uncheck("[name=must_call]")
        await page.click("dialog .main")
        await page.fill("[aria-label='What weather gave']", "It rains.")
        async with page.expect_request("**/v1/chat/completions") as sent:
            await page.click(".results button")
        messages = (await sent.value).post_data_json["messages"]
        assert [one["role"] for one in messages] == ["user", "assistant", "tool"]
        assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
        assert messages[2]["content"] == "It rains."
        await expect(page.locator(".tool .body")).to_have_text("It rains.")
        await expect(page.locator(".results")).to_have_count(0)
        await expect(page.locator(".assistant")).to_have_count(2)
        await expect(page.locator("#messages .error")).to_have_count(0)
