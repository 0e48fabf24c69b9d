"""Which compiler a build takes for the kernels: the machine's where it is one, else PyPI's."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

BACKEND = Path(__file__).parents[2] / "scripts/build_backend.py"


@pytest.fixture
def backend() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_backend", BACKEND)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("version", "serves"), [("9", False), ("10", False), ("11", True)])
def test_an_old_gcc_is_none(
    version: str, serves: bool, backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in: this machine's, that says it were another version."""
    if not (own := shutil.which("g++")):
        pytest.skip("needs a gcc")
    other = tmp_path / "g++"
    other.write_text(f'#!/bin/sh\nexec {own} -U__GNUC__ -D__GNUC__={version} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert backend.has_compiler() == serves


def test_what_does_not_run_is_none(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert not backend.has_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert not backend.has_compiler()
