"""tinychat in Firefox, whose engine is not Chromium's: what the page does most, in one visit."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import cluster
from exported_chats import FORMULAS, NASTY, exported
from firefox import FIREFOX, firefox

pytestmark = pytest.mark.skipif(FIREFOX is None, reason="no Firefox on this machine")


async def test_a_visit(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c, firefox(tmp_path / "profile") as page:
        c.add("n0", "--memory", "2GB", EXO_DUMMY_FAULTS="delay=0.01")
        c.add("n1", "--memory", "1GB", EXO_DUMMY_FAULTS="delay=0.01")
        await c.together()
        await c.nodes["n0"].chat()  # so that the dummy is served, and listed
        await page.goto(c.nodes["n1"].url)
        await page.shows("#cluster", "2 nodes.*dummy ready")
        await page.run("() => localStorage.setItem('tinychat.model', 'dummy')")
        await page.reload()

        await page.click("#input")
        await page.press("hello\n")
        await page.shows(".user .body", "^hello$")
        await page.shows(".assistant .body", ".{20}")
        await page.click("#stop")
        await page.shows("#send", "Send")
        await page.shows(".assistant", "stopped")

        await page.click("#input")
        await page.press("again\n")
        await page.shows(".user .body", "^again$")
        await page.shows(".assistant .body", ".{100}")
        await page.reload()  # in the middle of an answer, which is kept
        await page.shows(".assistant .body", ".{20}.*interrupted")
        assert await page.count(".message") == 4

        await page.click("#cluster")
        await page.shows("#picture", "n0.*n1")
        assert await page.count("#picture svg .arc") == 2
        await page.click("#cluster")
        await page.click("#models")
        await page.shows("#here", "fits here")
        await page.click("#catalog-close")

        asked = "() => performance.getEntriesByType('resource').map(({ name }) => name)"
        (tmp_path / "chats.json").write_bytes(exported(NASTY, FORMULAS))
        await page.give_file("#import", tmp_path / "chats.json")
        await page.shows("#said", "2 conversations were read")
        await page.run("() => [...document.querySelectorAll('#list .title')].at(-1).click()")
        await page.shows(".assistant .body h1", "^A title$")
        assert await page.count(".assistant .body td") == 2
        assert await page.count(".assistant .body pre .hljs-keyword")
        for tag in ("img", "script", "svg", "style", "iframe", "form", "a[href^=javascript]"):
            assert await page.count(f".assistant .body {tag}") == 0
        assert await page.run("() => window.hurt ?? null") is None
        assert not [url for url in await page.run(asked) if "evil" in url]
        await page.run("() => [...document.querySelectorAll('#list .title')].at(-2).click()")
        await page.shows(".assistant .body math .boxed", "42")
        assert await page.count(".assistant .body math") == 5
        assert page.complaints == []
