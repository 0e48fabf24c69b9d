"""`exo update`, with git and clones of a repository in a folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import exo
from exo.cli.main import main

CHANGES = "# Changelog\n\n## Unreleased\n\n{}- It runs.\n"


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def commit(folder: Path, file: str, text: str, why: str) -> None:
    (folder / file).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", why)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "CHANGELOG.md", CHANGES.format(""), "first")
    return folder


@pytest.fixture
def ours(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The clone that is taken for the one exo runs from."""
    folder = theirs.with_name("our clone")
    git(theirs, "clone", "-q", str(theirs), str(folder))
    monkeypatch.setattr(exo, "__file__", str(folder / "exo" / "__init__.py"))
    return folder


def test_nothing_newer(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["update"]) == 0
    said = capsys.readouterr()
    assert "there is nothing newer in origin/main" in said.out
    assert said.err == "asking origin what is newer\n"


def test_what_is_new(ours: Path, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(theirs, "CHANGELOG.md", CHANGES.format("- It flies.\n"), "fly")
    commit(theirs, "README.md", "exo", "say so")
    before = (ours / "CHANGELOG.md").read_text()
    assert main(["update"]) == 0
    said = capsys.readouterr().out
    assert "origin/main is 2 commits ahead\n  - It flies.\nto update: exo drain; git -C '" in said
    assert "It runs" not in said and "of its own" not in said
    assert (ours / "CHANGELOG.md").read_text() == before


def test_no_word_in_the_changelog(
    ours: Path, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(theirs, "README.md", "exo", "A README")
    commit(ours, "own.txt", "mine", "mine")
    assert main(["update"]) == 0
    said = capsys.readouterr().out
    assert "is 1 commit ahead\n  - A README\nthis clone has changes of its own" in said


def test_for_programs(ours: Path, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(theirs, "README.md", "exo", "A README")
    (ours / "CHANGELOG.md").write_text("mine")
    assert main(["update", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["newer"], said["own"], said["is_changed"]) == (1, 0, True)
    assert said["followed"] == "origin/main" and said["version"] == exo.__version__


def test_who_cannot_tell(
    ours: Path, theirs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        assert main(["update"]) == 1
        return capsys.readouterr().err

    theirs.rename(theirs.with_name("moved"))
    assert "git fetch in " in refused()
    git(ours, "switch", "-q", "--detach")
    assert "which follows no branch of another repository: git switch main" in refused()
    monkeypatch.setenv("PATH", "")
    assert "git is not on this machine" in refused()
    monkeypatch.setattr(exo, "__file__", "/usr/lib/python3/site-packages/exo/__init__.py")
    assert "is installed as a package: what installed it knows" in refused()
