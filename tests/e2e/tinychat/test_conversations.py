"""Conversations are kept, found, named, linked to, read in."""

from __future__ import annotations

import json

from exported_chats import exported
from playwright.async_api import Page, expect
from tinychat_page import IN_BROWSER, answered, ask, read_in, said

pytestmark = IN_BROWSER


async def test_the_conversation_is_kept_and_can_be_begun_anew(page: Page) -> None:
    await ask(page, "first")
    await said(page)
    await page.click("#stop")
    await expect(page.locator("#send")).to_be_visible()
    await page.reload()
    await expect(page.locator(".user .body")).to_have_text("first")
    await expect(page.locator(".assistant")).to_have_count(1)
    await page.click("#clear")
    await expect(page.locator(".message")).to_have_count(0)
    await expect(page.locator("#welcome")).to_be_visible()


async def test_conversations_are_listed_found_named_and_deleted(page: Page) -> None:
    for text in ("about apples", "about pears"):
        await page.click("#clear")
        await answered(page, text)
    titles = page.locator("#list .title")
    await expect(titles).to_have_text(["about pears", "about apples"])
    await page.fill("#search", "apple")
    await expect(titles).to_have_text(["about apples"])
    await page.click("#list .title")
    await expect(page.locator(".user .body")).to_have_text("about apples")
    await page.reload()  # a link to the conversation
    await expect(page.locator(".user .body")).to_have_text("about apples")
    page.on("dialog", lambda dialog: dialog.accept("fruit"))
    await page.hover("#list li")
    await page.click("#list li:has-text('about apples') [title=rename]")
    await expect(titles).to_have_text(["about pears", "fruit"])
    await page.click("#list li:has-text('fruit') [title=delete]")
    await expect(titles).to_have_text(["about pears"])
    await expect(page.locator(".message")).to_have_count(0)


async def test_a_message_has_a_link(page: Page) -> None:
    for text in ("first", "second"):
        await ask(page, text)
        await said(page)
        await page.click("#stop")
        await expect(page.locator("#send")).to_be_visible()
    link = page.locator(".user", has_text="first").get_by_label("link to this message")
    address = await link.evaluate("a => a.href")
    await page.click("#clear")
    await expect(page.locator(".message")).to_have_count(0)
    await page.goto(address)
    await expect(page.locator(".message")).to_have_count(4)
    await expect(page.locator(".user", has_text="first")).to_be_in_viewport()


async def test_a_damaged_file_changes_nothing(page: Page) -> None:
    for data, text in {
        b"not json": "not JSON",
        b"[]": "not of the format",
        exported("x").replace(b'"parent": "m0"', b'"parent": "m9"'): "damaged message m1",
    }.items():
        await read_in(page, data)
        await expect(page.locator("#said.error")).to_contain_text(text)
    await expect(page.locator("#list li")).to_have_count(0)


async def test_ten_thousand_messages_among_a_hundred_conversations(page: Page) -> None:
    conversations = json.loads(exported(*["An answer."] * 100))["conversations"]
    messages = {
        f"m{i}": {
            "id": f"m{i}",
            "parent": f"m{i - 1}" if i else None,
            "role": "assistant" if i % 2 else "user",
            "content": f"message **{i}** with `code` and $x_{i}$",
        }
        for i in range(10_000)
    }
    long = {"id": "long", "title": "the long one", "updated": 1000, "head": "m9999"}
    conversations.append(long | {"settings": {}, "messages": messages})
    whole = {"format": "tinychat-conversations-1", "conversations": conversations}
    await read_in(page, json.dumps(whole).encode())
    await expect(page.locator("#said")).to_have_text("101 conversations were read")
    await page.fill("#search", "long one")
    await page.click("#list .title")
    shown = page.locator(".message")
    await expect(shown).to_have_count(100)
    await expect(shown.last).to_contain_text("message 9999")
    in_view = "e => e.getBoundingClientRect().bottom <= innerHeight"
    assert await shown.last.locator(".body").evaluate(in_view)
    first = shown.first
    await first.scroll_into_view_if_needed()
    await page.click("text=Earlier messages (9900)")
    await expect(shown).to_have_count(200)
    await expect(shown.first).to_contain_text(
        "message **9800**"
    )  # what people write stays as it is
    await expect(page.locator(".earlier")).to_have_text("Earlier messages (9800)")
    await page.fill("#input", "hello")
    await page.press("#input", "Enter")
    await page.wait_for_selector("#send", state="visible")
    await expect(shown).to_have_count(202)
