"""A browser keeps what a page is made of until it changes, and never mixes two versions of it."""

from __future__ import annotations

import re
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from exo.api.http.pages import Pages


async def test_a_page_names_the_version_of_what_it_loads(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "index.html").write_text('<script src="/page/main.js"></script>')
    (tmp_path / "main.js").write_text("one")
    (tmp_path / "words/de.json").write_text("{}")
    (tmp_path.parent / "secret.txt").write_text("not a file of the page")
    pages, app = Pages(tmp_path, "/page/"), web.Application()
    app.router.add_get("/", pages.page("index.html", {"X-Policy": "none"}))
    pages.add_to(app)
    async with TestClient(TestServer(app)) as client:

        async def loads() -> str:
            response = await client.get("/")
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["X-Policy"] == "none"
            [found] = re.findall(r'src="(/page/[0-9a-f]{16}/main\.js)"', await response.text())
            return str(found)

        first = await loads()
        assert await loads() == first
        response = await client.get(first)
        assert response.status == 200 and await response.text() == "one"
        assert "immutable" in response.headers["Cache-Control"]
        assert (await client.get(first.replace("main.js", "words/de.json"))).status == 200
        plain = await client.get("/page/main.js")
        assert plain.headers["Cache-Control"] == "no-cache"
        for nowhere in ("/page/nothing.js", "/page/..%2Fsecret.txt", "/page/%2e%2e/secret.txt"):
            assert (await client.get(nowhere)).status == 404
        (tmp_path / "main.js").write_text("another")
        second = await loads()
        assert second != first
        assert await (await client.get(second)).text() == "another"
        # A page that was opened before the update gets what there is, and keeps it for no longer.
        late = await client.get(first)
        assert await late.text() == "another" and late.headers["Cache-Control"] == "no-cache"
