"""tinychat in a real browser: Chromium, driven by Playwright, against a real two-node cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from importlib.resources import files
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

EXPECTED = re.compile(
    "status of (400|404|502)|requires 'TrustedHTML'"
    "|net::ERR_(CONNECTION_REFUSED|CONNECTION_RESET|INCOMPLETE_CHUNKED_ENCODING)"
)
"""What the browser says of what a test does on purpose."""

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
                if m.type == "error" and not EXPECTED.search(m.text)
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


async def said(page: Page, characters: int = 20) -> None:
    """Wait until the newest answer has as many. (The page's policy forbids what Playwright's own
    wait for a function does.)"""
    enough = re.compile(f".{{{characters}}}", re.DOTALL)
    await expect(page.locator(".assistant .body").last).to_have_text(enough, timeout=10_000)


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


async def test_markup_in_a_message_is_text(page: Page) -> None:
    await ask(page, "<img src=x onerror=alert(1)>")
    await expect(page.locator(".user .body")).to_have_text("<img src=x onerror=alert(1)>")
    await expect(page.locator(".user img")).to_have_count(0)
    await page.click("#stop")
    await expect(page.locator("#send")).to_be_visible()


async def answered(page: Page, text: str = "") -> None:
    """Ask, if there is a text, and wait until an answer was stopped after some of it."""
    if text:
        await ask(page, text)
    await said(page)
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


async def test_a_reload_in_the_middle_of_an_answer_keeps_what_came(page: Page) -> None:
    await ask(page, "hello")
    await said(page, 300)
    shown = await page.locator(".assistant .body").inner_text()
    await page.reload()
    await expect(page.locator(".assistant .body")).to_contain_text("interrupted")
    kept = (await page.locator(".assistant .body").inner_text()).partition("interrupted")[0].strip()
    assert len(kept) > 20 and (shown.startswith(kept) or kept.startswith(shown))


NASTY = """
# A *title*

| a | b |
|---|--:|
| 1 | `x < y` |

3. one
4. two

```python
def f(x): return "<b>" # no
```

<img src=x onerror="window.hurt=1"> <script>window.hurt=2</script>
[good](https://example.org) [bad](javascript:window.hurt=3) ![pixel](https://evil.example/x.png)
<svg onload=window.hurt=4> <a href="data:text/html,<script>window.hurt=5</script>">d</a>
<style>body{display:none}</style> <iframe srcdoc="<script>parent.hurt=6</script>"></iframe>
[x](data:text/html;base64,PHNjcmlwdD4=) <form action=//evil.example><input name=q></form>
"""


def exported(*answers: str) -> bytes:
    """A file as the page exports it."""
    conversations = []
    for number, text in enumerate(answers):
        messages = {
            "m0": {"id": "m0", "parent": None, "role": "user", "content": "?"},
            "m1": {"id": "m1", "parent": "m0", "role": "assistant", "content": text},
        }
        conversations.append(
            {"id": f"c{number}", "title": f"t{number}", "updated": number, "head": "m1"}
            | {"settings": {}, "messages": messages}
        )
    whole = {"format": "tinychat-conversations-1", "conversations": conversations}
    return json.dumps(whole).encode()


async def read_in(page: Page, data: bytes) -> None:
    file = {"name": "chats.json", "mimeType": "application/json", "buffer": data}
    await page.set_input_files("#import", files=[file])  # type: ignore[list-item]


async def test_markdown_is_drawn_and_nothing_in_it_runs(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await read_in(page, exported(NASTY))
    await expect(page.locator("#said")).to_have_text("1 conversations were read")
    await page.click("#list .title")
    body = page.locator(".assistant .body")
    await expect(body.locator("h1")).to_have_text("A title")
    await expect(body.locator("td").nth(1)).to_have_text("x < y")
    await expect(body.locator("td").nth(1)).to_have_attribute("align", "right")
    await expect(body.locator("ol")).to_have_attribute("start", "3")
    await expect(body.locator("ol li")).to_have_text(["one", "two"])
    await expect(body.locator("pre .hljs-keyword").first).to_have_text("def")
    await expect(body.locator("a[href='https://example.org']")).to_have_attribute(
        "rel", "noopener noreferrer nofollow"
    )
    for tag in ("img", "script", "svg", "style", "iframe", "form", "a[href^=javascript]"):
        await expect(body.locator(tag)).to_have_count(0)
    await expect(body.locator("a[href^=data]")).to_have_count(0)
    assert await page.evaluate("window.hurt") is None
    assert not [url for url in asked if "evil" in url]


FORMULAS = r"""
The area is $\pi r^2$, or \(\frac{a}{b}\) of it; it costs $5 and $6.

$$
\int_0^1 x^2\,dx

= \frac{1}{3}
$$

\[ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \]

So $\boxed{42}$, `$code$`, $\nosuch{x}$ and \\$.

```
$x$
```
"""


async def test_formulas_are_drawn(page: Page) -> None:
    await read_in(page, exported(FORMULAS))
    await page.click("#list .title")
    body = page.locator(".assistant .body")
    await expect(body.locator("math")).to_have_count(5)
    await expect(body.locator("p.math > math[display=block]")).to_have_count(2)
    await expect(body.locator("math .boxed")).to_have_text("42")
    await expect(body.locator("mtable mtr")).to_have_count(2)
    await expect(body).to_contain_text("it costs $5 and $6.")
    await expect(body.locator("code", has_text="nosuch")).to_have_text(r"$\nosuch{x}$")
    await expect(body.locator("pre code")).to_have_text("$x$\n")
    # As it grows, letter by letter, it becomes the same, and a formula is not cut in two.
    same = """async (text) => {
      const page = document.querySelector("script[type=module]").src; // its very module, not a twin
      const { Growing, render } = await import(new URL("markdown.js", page));
      const [grown, whole] = [document.createElement("div"), document.createElement("div")];
      document.body.append(grown);
      let drawn;
      const growing = new Growing(grown, () => drawn());
      for (let end = 1; end <= text.length; end += 3) {
        const done = new Promise((resolve) => (drawn = resolve));
        growing.show(text.slice(0, end));
        await done;
      }
      const before = grown.querySelectorAll("math").length;
      growing.finish(text);
      render(whole, text);
      return [before, grown.innerHTML === whole.innerHTML];
    }"""
    assert await page.evaluate(same, FORMULAS) == [5, True]


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


async def test_hundreds_of_attacks_do_nothing(page: Page) -> None:
    places = ["{}", "```html\n{}\n```", "| {} |\n|---|", "[{}]({})", "# {}", "`{}`", "> {}"]
    handlers = ["onerror", "onload", "onclick", "onfocus autofocus", "onmouseover", "ontoggle open"]
    tags = ["img src=x", "svg", "body", "input", "details", "video", "a href=x", "math", "object"]
    attacks = [f"<{tag} {on}=window.hurt=1>" for tag in tags for on in handlers]
    attacks += ["javascript:window.hurt=1", "jav&#x09;ascript:window.hurt=1"]
    formulas = ["\\href{javascript:window.hurt=1}{x}", "\\text{<img src=x onerror=window.hurt=1>}"]
    formulas += ['\\class{x" onclick=window.hurt=1}{x}', "\\data{onclick=window.hurt=1}{x}"]
    formulas += ["\\includegraphics{javascript:window.hurt=1}", "\\style{color:red}{window.hurt}"]
    attacks += [f"${formula}$" for formula in formulas]
    text = "\n\n".join(place.replace("{}", one) for one in attacks for place in places)
    assert len(attacks) * len(places) > 300
    await read_in(page, exported(text))
    await page.click("#list .title")
    await expect(page.locator(".assistant .body")).to_contain_text("window.hurt")
    # Everything that looks like something to press is pressed.
    links = "[...document.querySelectorAll('.assistant .body a[href]')].map((a) => a.protocol)"
    assert set(await page.evaluate(links)) <= {"http:", "https:", "mailto:"}
    handled = "[...document.querySelectorAll('.assistant .body *')].filter((e) => "
    handled += "[...e.attributes].some((a) => a.name.startsWith('on'))).length"
    assert await page.evaluate(handled) == 0
    assert await page.evaluate("window.hurt") is None


async def test_the_policy_lets_nothing_else_run(page: Page) -> None:
    ran = await page.evaluate(
        "() => { try { document.body.innerHTML = '<p>'; return true } catch { return false } }"
    )
    assert ran is False
    answer = await page.request.get(page.url.partition("#")[0])
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy and "script-src 'self'" in policy


async def test_a_damaged_file_changes_nothing(page: Page) -> None:
    for data, text in {
        b"not json": "not JSON",
        b"[]": "not of the format",
        exported("x").replace(b'"parent": "m0"', b'"parent": "m9"'): "damaged message m1",
    }.items():
        await read_in(page, data)
        await expect(page.locator("#said.error")).to_contain_text(text)
    await expect(page.locator("#list li")).to_have_count(0)


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


async def test_nodes_come_and_go_and_the_page_comes_back(page: Page, c: Cluster) -> None:
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


async def test_a_draft_is_counted(page: Page) -> None:
    await page.fill("#input", "hello")
    await expect(page.locator("#draft")).to_have_text(re.compile(r"\d+ of [\d,]+ tokens"))
    few = await page.locator("#draft").text_content()
    await page.fill("#input", "hello " * 50)
    await expect(page.locator("#draft")).not_to_have_text(few or "")
    await page.fill("#input", "")
    await expect(page.locator("#draft")).to_be_hidden()


async def test_a_pasted_file_is_attached(page: Page) -> None:
    await page.locator("#input").evaluate(
        """input => {
            const clipboardData = new DataTransfer();
            clipboardData.items.add(new File(["print(1)"], "one.py"));
            input.dispatchEvent(new ClipboardEvent("paste", { clipboardData }));
        }"""
    )
    await expect(page.locator("#input")).to_have_value(re.compile("one.py:\n```\nprint"))


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


async def test_lines_with_a_slash_are_commands(page: Page) -> None:
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
    await expect(page.locator(".stats")).to_contain_text("tokens", timeout=20_000)
    await ask(page, "/stats")
    await expect(page.locator("#said")).to_contain_text("tokens")
    async with page.expect_request("**/v1/chat/completions"):
        await ask(page, "/regen")
    await answered(page)
    await ask(page, "/new")
    await expect(page.locator("#messages .message")).to_have_count(0)


async def test_text_files_are_attached(page: Page) -> None:
    file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"one\ntwo\n"}
    await page.set_input_files("#files", files=[file])  # type: ignore[list-item]
    await expect(page.locator("#input")).to_have_value("notes.txt:\n```\none\ntwo\n```\n")
    file = {"name": "x.bin", "mimeType": "text/plain", "buffer": b"\0\1"}
    await page.set_input_files("#files", files=[file])  # type: ignore[list-item]
    await expect(page.locator("#said.error")).to_contain_text("x.bin is no text")


async def test_a_phone_has_the_list_behind_a_button(page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 800})
    await expect(page.locator("#list")).not_to_be_in_viewport()
    await page.click("#menu")
    await expect(page.locator("#search")).to_be_in_viewport()
    wide = "document.documentElement.scrollWidth"
    assert await page.evaluate(wide) <= 390


async def test_an_error_is_shown_as_one(page: Page, c: Cluster) -> None:
    await ask(page, "x" * 5000)
    await expect(page.locator("#messages .error")).to_contain_text("the context of dummy is 4096")


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
            await page.goto(f"{node.url}/docs/guide")
            await expect(page.locator("h1")).to_have_text("Ten minutes' start")
            await page.click("main >> text=A cluster at home")  # a link from page to page
            await expect(page.locator("h1")).to_have_text("A cluster at home")
            await page.click("nav >> text=How it works")
            await page.click('main a:text("docs/decisions/")')
            await expect(page.locator("h1")).to_contain_text("cut by replacing layer classes")
            await page.goto(f"{node.url}/docs/guide#no-such")
            await expect(page.locator("main")).to_have_text("there is no page no-such")
            await browser.close()


async def shot(page: Page, name: str) -> None:
    """Where EXO_SHOTS is a folder, a picture to look at."""
    if folder := os.environ.get("EXO_SHOTS"):
        await page.screenshot(path=f"{folder}/{name}.png")


async def test_models_are_found_loaded_placed_and_unloaded(page: Page, c: Cluster) -> None:
    await page.click("#models")
    row = page.locator('.choice[data-model="smollm2-135m"]')
    await expect(row.locator(".badge")).to_have_text("fits here")
    huge = page.locator('.choice[data-model="deepseek-v3"]')
    await expect(huge.locator(".badge")).to_contain_text("too large by")
    await shot(page, "models")
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


async def test_a_model_of_the_hub_is_found_brought_loaded_and_deleted(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "llama")
    zoo.write_tokenizer(tmp_path / "llama")
    files = {f.name: f.read_bytes() for f in (tmp_path / "llama").iterdir()}
    async with cluster(tmp_path) as c, async_playwright() as playwright:
        with HubServer() as hub:
            hub.put("org/tiny-llama", files)
            node = c.add_with_cache("a", hub.url)
            await c.together()
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = await browser.new_page()
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
            await shot(page, "models-hub")
            await row.get_by_role("button", name="Unload").click()
            await expect(row).to_contain_text("its memory is free", timeout=20_000)
            page.on("dialog", lambda dialog: dialog.accept())
            await row.get_by_role("button", name="Delete").click()
            await expect(row).to_have_count(0, timeout=20_000)
            await browser.close()


AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")


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
    """What is grave in each view, which is shown in turn."""
    wrong = {"welcome": await grave(page)}
    await page.fill("#input", "/")
    await expect(page.locator("#commands button").first).to_be_visible()
    wrong["commands"] = await grave(page)
    await shot(page, f"commands-{name}")
    await ask(page, "hello **you**\n\n```python\nprint(1)\n```")
    await said(page, 5)
    await expect(page.locator("#send")).to_be_visible(timeout=60_000)
    wrong["chat"] = await grave(page)
    await shot(page, f"chat-{name}")
    await page.click("#cluster")
    await page.locator("#picture .machine button").first.click()
    await expect(page.locator("#picture .more").first).to_be_visible()
    wrong["cluster"] = await grave(page)
    await shot(page, f"cluster-{name}")
    await page.click("#cluster")
    await page.click("#settings")
    wrong["settings"] = await grave(page)
    await page.keyboard.press("Escape")
    await page.click("#models")
    await expect(page.locator("#here .choice").first).to_be_visible()
    wrong["models"] = await grave(page)
    await shot(page, f"models-{name}")
    await page.keyboard.press("Escape")
    if await page.locator("#menu").is_visible():
        await page.click("#menu")
        wrong["list"] = await grave(page)
        await shot(page, f"list-{name}")
    return {view: found for view, found in wrong.items() if found}


async def test_it_speaks_what_the_browser_asks_for(c: Cluster) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
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
        await browser.close()


async def test_axe_finds_nothing_serious(c: Cluster) -> None:
    """In no view, theme or width. (The check itself is a script that the page's policy forbids.)"""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for theme, width in (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)):
            context = await browser.new_context(
                bypass_csp=True,
                color_scheme=theme,  # type: ignore[arg-type]
                viewport={"width": width, "height": 800},
                reduced_motion="reduce",
            )
            page = await context.new_page()
            await page.goto(c.nodes["n1"].url)
            await page.select_option("#model", "dummy")
            wrong = await views(page, f"{theme}-{width}")
            assert not wrong, json.dumps(wrong, indent=2)
            await context.close()
        await browser.close()
