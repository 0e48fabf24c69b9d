import subprocess
import sys
from pathlib import Path

import pytest

from exo.cli.keys import cluster_key
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


@pytest.mark.parametrize("kept", [b"../../evil\0\n" * 3, b"\xff\xfe\0", b"x" * 5000])
def test_a_damaged_id_file_is_replaced(kept: bytes, tmp_path: Path) -> None:
    (tmp_path / "node_id").write_bytes(kept)
    found = node_id(tmp_path)
    assert found.isprintable() and "/" not in found
    assert (tmp_path / "node_id").read_text() == found + "\n"


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


def parsed_key(*flags: str) -> str:
    return cluster_key(build_parser().parse_args(flags))


def test_a_cluster_key_is_of_a_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert parsed_key() == ""
    monkeypatch.setenv("EXO_CLUSTER_KEY", "of the environment")
    assert parsed_key() == "of the environment"
    file = tmp_path / "key"
    file.write_text("of a file, and longer\n")
    file.chmod(0o600)
    assert parsed_key("--cluster-key-file", str(file)) == "of a file, and longer"
    file.write_bytes(b"\xef\xbb\xbfof a file, and longer\r\n")  # as some editors write it
    assert parsed_key("--cluster-key-file", str(file)) == "of a file, and longer"
    assert not caplog.messages
    file.chmod(0o644)
    assert parsed_key("--cluster-key-file", str(file)) == "of a file, and longer"
    assert "chmod 600" in caplog.text
    assert "of a file" not in caplog.text
    monkeypatch.setenv("EXO_HOME", str(tmp_path))
    config = node_config(build_parser().parse_args(["--cluster-key-file", str(file)]))
    assert config.cluster_key and config.cluster_key not in repr(config)


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"two lines,\nwhich are no key", b"\xff" * 20]
)
def test_what_is_no_cluster_key_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"--cluster-key-file .*key: ") as refused:
        parsed_key("--cluster-key-file", str(file))
    assert "short" not in refused.value.message
    with pytest.raises(InvalidRequest, match=r"openssl rand -hex 32 > .*none"):
        parsed_key("--cluster-key-file", str(tmp_path / "none"))


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
