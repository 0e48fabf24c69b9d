"""The documentation: it makes a site, its links lead somewhere, and a node shows the same pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#]+)")


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "start.html").is_file()


def test_what_the_readme_links_to_is_there() -> None:
    for file in ("README.md", "CHANGELOG.md"):
        for target in _LINK.findall((ROOT / file).read_text()):
            assert (ROOT / target).exists(), f"{file}: {target}"


def test_a_node_shows_every_page_of_the_site() -> None:
    site = set(re.findall(r"- (\w+)\.md", (ROOT / "mkdocs.yml").read_text())) - {"index"}
    guide = re.search(r"const PAGES = \{(.*?)\n\};", (ROOT / "tinychat/guide.js").read_text(), re.S)
    assert guide is not None
    assert set(re.findall(r"^  (\w+):", guide[1], re.M)) == site
