"""One browser and one cluster of two nodes for all tests that change neither."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from cluster import Cluster, cluster
from playwright.async_api import Browser, Page, async_playwright
from tinychat_page import CHROMIUM, FLAGS, watched


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def c(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path_factory.mktemp("pair")) as made:
        made.add("n0", "--memory", "2GB", EXO_DUMMY_FAULTS="delay=0.01")
        made.add("n1", "--memory", "1GB", EXO_DUMMY_FAULTS="delay=0.01")
        await made.together()
        await made.nodes["n0"].chat()  # so that the dummy is served, and listed
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def page(c: Cluster, browser: Browser) -> AsyncIterator[Page]:
    """As on a first visit."""
    context = await browser.new_context()
    page = await context.new_page()
    complaints = watched(page)
    await page.goto(c.nodes["n1"].url)
    await page.select_option("#model", "dummy")
    yield page
    await context.close()
    assert complaints == []
