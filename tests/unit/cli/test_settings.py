import subprocess
import sys
from pathlib import Path

import pytest

from exo.cli.main import build_parser
from exo.cli.settings import home, node_config, node_id
from exo.errors import InvalidRequest, ModelNotFound


def test_the_node_id_stays_and_two_processes_never_share_it(tmp_path: Path) -> None:
    code = "import pathlib, sys; from exo.cli.settings import node_id; "
    code += "print(node_id(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    first, again = (subprocess.check_output(command, text=True).strip() for _ in range(2))
    assert first == again
    here = node_id(tmp_path)  # this process now holds it
    assert here == first
    other = subprocess.check_output(command, text=True).strip()
    assert other != here
    assert subprocess.check_output(command, text=True).strip() == other


def test_a_damaged_id_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "node_id").write_text("../../evil\x00\n" * 3)
    found = node_id(tmp_path)
    assert found.isprintable() and "/" not in found


def test_the_data_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXO_HOME", "/data/exo")
    assert home() == Path("/data/exo")
    monkeypatch.delenv("EXO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert home() == Path("/cache/exo")


def test_old_flags_and_new_ones_become_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXO_HOME", str(tmp_path))
    flags = "--node-id n --node-host 127.0.0.1 --node-port 7 --broadcast-port 8 --listen-port 8"
    flags += " --discovery-module none --inference-engine dummy --memory 2GB --interface lo"
    flags += " --kv-bits 8 --draft-model qwen3-0.6b"
    config = node_config(build_parser().parse_args(flags.split()))
    assert (config.node_id, config.node_host, config.listen_port) == ("n", "127.0.0.1", 7)
    assert (config.broadcast_port, config.discovery, config.engine) == (8, "none", "dummy")
    assert (config.memory_bytes, config.interfaces) == (2 * 10**9, ("lo",))
    assert (config.kv_bits, config.draft_model) == (8, "qwen3-0.6b")
    assert node_config(build_parser().parse_args(["--peers", "a:1"])).discovery == "manual"


def test_flags_before_and_after_run_both_count() -> None:
    args = build_parser().parse_args(["--memory", "3GB", "run", "m", "--interface", "lo"])
    assert (args.memory, args.interface, args.model) == ("3GB", ["lo"], "m")
    args = build_parser().parse_args(["--memory", "3GB", "run", "--memory", "4GB"])
    assert args.memory == "4GB"


def test_two_ports_for_announcements_are_refused(tmp_path: Path) -> None:
    args = build_parser().parse_args(["--listen-port", "1", "--broadcast-port", "2"])
    with pytest.raises(InvalidRequest, match="differ"):
        node_config(args)


def test_a_draft_model_that_cannot_be_is_refused_at_once() -> None:
    args = build_parser().parse_args(["--draft-model", "qwen3-0.6"])
    with pytest.raises(ModelNotFound, match="did you mean qwen3"):
        node_config(args)
