"""`exo service`: the files it writes and what it has the service manager do.

The service managers are stand-ins that note how they were called: neither systemd for users nor
launchd runs where the tests do. What systemd reads is checked by systemd itself where it is here.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from exo.cli.main import main
from exo.cli.service import Launchd, Systemd


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A HOME, and stand-ins that write their arguments to a file."""
    noted = tmp_path / "calls"
    noted.write_text("")
    for name in ("systemctl", "journalctl", "launchctl"):
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f'#!/bin/sh\necho "{name} $*" >> {noted}\n')
        stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return noted


def test_systemd(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setenv("EXO_HOME", "/data/my models/100%")
    monkeypatch.setenv("EXO_API_KEY", "secret")
    assert main(["service", "install", "--", "--memory", "12GB"]) == 0
    unit = Systemd().file.read_text()
    assert '"--disable-tui" "--memory" "12GB"' in unit
    assert 'Environment="EXO_HOME=/data/my models/100%%"' in unit
    assert "secret" not in unit
    if checker := shutil.which("systemd-analyze"):
        done = subprocess.run(
            [checker, "--user", "verify", Systemd().file],
            capture_output=True,
            text=True,
            env=os.environ | {"XDG_RUNTIME_DIR": str(calls.parent)},
        )
        assert done.returncode == 0, done.stderr
    assert main(["service", "status"]) == main(["service", "logs"]) == 0
    assert main(["service", "remove"]) == 0
    assert not Systemd().file.exists()
    assert calls.read_text().splitlines() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now exo",
        "systemctl --user --no-pager status exo",
        "journalctl --user --unit exo --lines 200 --no-pager",
        "systemctl --user disable --now exo",
        "systemctl --user daemon-reload",
    ]


def test_files_are_named_by_their_whole_paths_and_keys_are_looked_at(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service starts in another folder, and one that cannot start tells nobody."""
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.chdir(calls.parent)
    Path("key").write_text("0123456789abcdef\n")
    Path("key").chmod(0o600)
    files = ["--cluster-key-file", "key", "--models-dir=.", "--node-id", "key"]
    assert main(["service", "install", "--", *files]) == 0
    unit = Systemd().file.read_text()
    key, folder = f'"--cluster-key-file" "{calls.parent}/key"', f'"--models-dir" "{calls.parent}"'
    assert f'{key} {folder} "--node-id" "key"' in unit
    assert main(["service", "install", "--", "--cluster-key-file", "nokey"]) == 1
    assert "openssl rand -hex 32 > nokey" in capsys.readouterr().err
    monkeypatch.setenv("EXO_CLUSTER_KEY", "0123456789abcdef")
    assert main(["service", "install"]) == 1
    assert "a service does not see it" in capsys.readouterr().err


def test_launchd(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert main(["service", "install"]) == 0
    agent = plistlib.loads(Launchd().file.read_bytes())
    assert agent["ProgramArguments"][-1] == "--disable-tui"
    assert agent["KeepAlive"] == {"SuccessfulExit": False} and agent["RunAtLoad"]
    assert main(["service", "install"]) == 0, "once more, with other flags perhaps"
    assert main(["service", "remove"]) == 0
    did = [line.split()[1] for line in calls.read_text().splitlines()]
    assert did == ["bootstrap", "bootout", "bootstrap", "bootout"]


def test_what_cannot_be(calls: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert main(["service", "status"]) == 1
    assert "exo service install" in capsys.readouterr().err
    assert main(["service", "install", "--", "--no-such-flag"]) == 1
    assert "--no-such-flag" in capsys.readouterr().err
    assert main(["service", "install", "--", "--api-key", "secret"]) == 1
    assert "--api-key-file" in capsys.readouterr().err
    assert main(["service", "install", "--", "run"]) == 1
    assert "a service is a node" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["service", "install"]) == 1
    assert "systemctl is not on this machine" in capsys.readouterr().err
