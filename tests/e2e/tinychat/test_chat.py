"""Asking, and what is said: a real browser against a real cluster of two nodes."""

from __future__ import annotations

import re

import pytest
from cluster import Cluster, until
from playwright.async_api import Page, expect
from tinychat_page import IN_BROWSER, answered, ask, said

pytestmark = IN_BROWSER


async def test_it_shows_the_cluster_and_streams_an_answer(page: Page) -> None:
    await expect(page.locator("#cluster")).to_contain_text("2 nodes")
    await expect(page.locator("#cluster")).to_contain_text("dummy ready")
    await ask(page, "hello")
    await expect(page.locator(".user .body")).to_have_text("hello")
    await expect(page.locator("#stop")).to_be_visible()
    await said(page)
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


async def test_markup_in_a_message_is_text(page: Page) -> None:
    await ask(page, "<img src=x onerror=alert(1)>")
    await expect(page.locator(".user .body")).to_have_text("<img src=x onerror=alert(1)>")
    await expect(page.locator(".user img")).to_have_count(0)
    await page.click("#stop")
    await expect(page.locator("#send")).to_be_visible()


async def test_questions_are_edited_and_answers_asked_for_again(page: Page) -> None:
    await answered(page, "first")
    await page.click(".assistant button:has-text('Again')")
    await answered(page)
    await expect(page.locator(".assistant footer")).to_contain_text("2/2")
    await page.click("[aria-label='earlier branch']")
    await expect(page.locator(".assistant footer")).to_contain_text("1/2")
    await page.click(".user button:has-text('Edit')")
    await expect(page.locator("#input")).to_have_value("first")
    await page.fill("#input", "second")
    await page.press("#input", "Enter")
    await answered(page)
    await expect(page.locator(".user .body")).to_have_text("second")
    await page.click(".user [aria-label='earlier branch']")
    await expect(page.locator(".user .body")).to_have_text("first")
    await page.click(".assistant button:has-text('Go on')")
    await answered(page)
    await expect(page.locator(".message")).to_have_count(2)


async def test_a_reload_in_the_middle_of_an_answer_keeps_what_came(page: Page) -> None:
    await ask(page, "hello")
    await said(page, 300)
    shown = await page.locator(".assistant .body").inner_text()
    await page.reload()
    await expect(page.locator(".assistant .body")).to_contain_text("interrupted")
    kept = (await page.locator(".assistant .body").inner_text()).partition("interrupted")[0].strip()
    assert len(kept) > 20 and (shown.startswith(kept) or kept.startswith(shown))


async def test_a_question_is_kept_before_it_is_asked(page: Page) -> None:
    async with page.expect_request("**/v1/chat/completions"):
        await ask(page, "Is it there?")
    await page.reload()
    await expect(page.locator(".user .body")).to_have_text("Is it there?")
    await expect(page.locator(".assistant .body")).to_contain_text("interrupted")


async def test_a_conversation_that_cannot_be_kept_is_answered_all_the_same(page: Page) -> None:
    await page.evaluate("""() => {
      IDBObjectStore.prototype.put = () => { throw new Error("the disk is full"); };
    }""")
    await answered(page, "hello")
    await expect(page.locator("#said")).to_contain_text("did not keep the conversation")
    await expect(page.locator("#said")).to_contain_text("the disk is full")


async def test_a_database_that_does_not_answer_delays_a_question_and_no_more(page: Page) -> None:
    await page.evaluate("""() => { IDBFactory.prototype.open = () => ({}); }""")
    await ask(page, "hello")
    await expect(page.locator("#said")).to_contain_text("does not answer", timeout=10_000)
    await answered(page)


async def test_a_draft_is_counted(page: Page) -> None:
    await page.fill("#input", "hello")
    await expect(page.locator("#draft")).to_have_text(re.compile(r"\d+ of [\d,]+ tokens"))
    few = await page.locator("#draft").text_content()
    await page.fill("#input", "hello " * 50)
    await expect(page.locator("#draft")).not_to_have_text(few or "")
    await page.fill("#input", "")
    await expect(page.locator("#draft")).to_be_hidden()


async def test_a_conversation_has_its_own_settings(page: Page) -> None:
    await page.click("#settings")
    await page.fill("[name=system]", "Be brief.")
    await page.fill("[name=max_tokens]", "5")
    await page.click("dialog .main")
    async with page.expect_request("**/v1/chat/completions") as sent:
        await ask(page, "hello")
    body = (await sent.value).post_data_json
    assert body["max_tokens"] == 5 and "temperature" not in body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    await expect(page.locator(".stats")).to_contain_text("5 tokens")
    await page.click("#settings")
    await page.click("#reset")
    await page.click("dialog .main")
    await page.click("#settings")
    await expect(page.locator("[name=system]")).to_have_value("")


@pytest.mark.parametrize("leave", ["Escape", "Cancel"])
async def test_settings_are_kept_by_enter_and_by_nothing_else_than_keep(
    page: Page, leave: str
) -> None:
    await page.click("#settings")
    await page.fill("[name=max_tokens]", "5")
    await page.press("[name=max_tokens]", "Enter")
    await expect(page.locator("#how")).to_be_hidden()
    await page.click("#settings")
    await page.fill("[name=max_tokens]", "7")
    await (page.keyboard.press("Escape") if leave == "Escape" else page.click("#leave"))
    await expect(page.locator("#how")).to_be_hidden()
    await page.click("#settings")
    await expect(page.locator("[name=max_tokens]")).to_have_value("5")


async def test_lines_with_a_slash_are_commands(page: Page) -> None:
    await page.click("#settings")
    await page.fill("[name=max_tokens]", "20")  # else how long an answer takes is the dummy's whim
    await page.press("[name=max_tokens]", "Enter")
    await expect(page.locator("#how")).to_be_hidden()
    await page.fill("#input", "/")
    await expect(page.locator("#commands button")).to_have_count(8)
    await page.fill("#input", "/sy")
    await page.press("#input", "Tab")
    await expect(page.locator("#input")).to_have_value("/system ")
    await expect(page.locator("#commands")).to_be_hidden()
    await page.keyboard.type("Be brief.")
    await page.press("#input", "Enter")
    await expect(page.locator("#said")).to_contain_text("kept for this conversation")
    await page.fill("#input", "/model nothing")
    await page.press("#input", "Enter")
    await expect(page.locator("#said")).to_contain_text("no model is named nothing; there are: ")
    await page.fill("#input", "/model dummy")
    await page.press("#input", "Enter")
    await expect(page.locator("#said")).to_contain_text("answers come from dummy now")
    async with page.expect_request("**/v1/chat/completions") as sent:
        await ask(page, "/usr/bin/env is what?")
    messages = (await sent.value).post_data_json["messages"]
    assert [each["content"] for each in messages] == ["Be brief.", "/usr/bin/env is what?"]
    await expect(page.locator(".stats")).to_contain_text("20 tokens", timeout=20_000)
    await ask(page, "/stats")
    await expect(page.locator("#said")).to_contain_text("tokens")
    async with page.expect_request("**/v1/chat/completions"):
        await ask(page, "/regen")
    await expect(page.locator(".stats")).to_contain_text("20 tokens", timeout=20_000)
    await ask(page, "/new")
    await expect(page.locator("#messages .message")).to_have_count(0)


async def test_text_files_are_attached(page: Page) -> None:
    file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"one\ntwo\n"}
    await page.set_input_files("#files", files=[file])  # type: ignore[list-item]
    await expect(page.locator("#input")).to_have_value("notes.txt:\n```\none\ntwo\n```\n")
    file = {"name": "x.bin", "mimeType": "text/plain", "buffer": b"\0\1"}
    await page.set_input_files("#files", files=[file])  # type: ignore[list-item]
    await expect(page.locator("#said.error")).to_contain_text("x.bin is no text")


async def test_a_pasted_file_is_attached(page: Page) -> None:
    await page.locator("#input").evaluate(
        """input => {
            const clipboardData = new DataTransfer();
            clipboardData.items.add(new File(["print(1)"], "one.py"));
            input.dispatchEvent(new ClipboardEvent("paste", { clipboardData }));
        }"""
    )
    await expect(page.locator("#input")).to_have_value(re.compile("one.py:\n```\nprint"))


async def test_an_error_is_shown_as_one(page: Page) -> None:
    await ask(page, "x" * 5000)
    await expect(page.locator("#messages .error")).to_contain_text("the context of dummy is 4096")
