"""What a model says is drawn, and nothing in it runs."""

from __future__ import annotations

from exported_chats import FORMULAS, NASTY, exported
from playwright.async_api import Page, expect
from tinychat_page import IN_BROWSER, read_in

pytestmark = IN_BROWSER


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
