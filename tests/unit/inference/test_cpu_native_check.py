"""native/check, built with sanitizers and for a processor that is emulated."""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from exo.inference.cpu import _native as native
from exo.networking.calls.messages import PROTOCOL

NATIVE = Path(__file__).parents[3] / "exo/inference/cpu/native"
CMAKE = Path(sys.executable).parent / "cmake"
NINJA = Path(sys.executable).parent / "ninja"
CLANG_TIDY = Path(sys.executable).parent / "clang-tidy"


DIGESTS = {16: "5b3c9aa1df2d3534"}
"""Of all that kernel_check computes, on any instruction set of any processor, by the protocol that
nodes speak. Where it changes with the arithmetic of the kernels, PROTOCOL is raised: a ring of two
versions would give other answers than one of either, and others again after a node left. Where it
changes with what kernel_check asks of them, or PROTOCOL for another reason, one of them stays."""

DIGEST = DIGESTS[PROTOCOL]

LITTLE_OPTIMIZED = ("CMAKE_BUILD_TYPE=Debug", "CMAKE_CXX_FLAGS_DEBUG=-Og")
"""What takes least time to compile and to run once."""

FEW_ROWS = "CMAKE_CXX_FLAGS=-DEXO_FEW_ROWS"
"""Not every size of tile: they are instances of the same templates, and each takes seconds."""


def configure(folder: Path, *options: str) -> None:
    """The check, without Python's module, with CMake options."""
    command = [CMAKE, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}", "-S", NATIVE, "-B", folder]
    options = ("EXO_PYTHON_MODULE=OFF", "EXO_KERNEL_CHECK=ON", *options)
    run([*map(str, command), *(f"-D{option}" for option in options)])


def build(folder: Path, *options: str, targets: Sequence[str] = ("kernel_check",)) -> Path:
    configure(folder, *options)
    run([str(NINJA), "-C", str(folder), *targets])
    return folder / "kernel_check"


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


@pytest.mark.parametrize(
    ("processor", "isas"), [("x86_64", "portable;avx2;amx"), ("aarch64", "i8mm")]
)
def test_clang_reads_them_too(processor: str, isas: str, tmp_path: Path) -> None:
    """It is macOS's compiler, and the one that PyPI brings where there is none; gcc takes what it
    does not. (AMX's sources have AVX-512's in them, and i8mm's NEON's.)"""
    if sys.platform != "linux":
        pytest.skip("the headers are Linux's")
    options = ("CMAKE_EXPORT_COMPILE_COMMANDS=ON", FEW_ROWS, f"EXO_ISAS={isas}")
    configure(tmp_path, f"EXO_PROCESSOR={processor}", *options)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    files = {command["file"] for command in commands if "/check/" not in command["file"]}
    target = f"--extra-arg=--target={processor}-linux-gnu"
    # Its own checks are not asked for, but it wants one.
    checks = "--checks=-*,clang-diagnostic-*,modernize-redundant-void-arg"
    run([str(CLANG_TIDY), "-p", str(tmp_path), "--quiet", target, checks, *sorted(files)])


def test_what_this_machine_cannot_run_compiles(tmp_path: Path) -> None:
    """scripts/setup builds only what runs here; wheels have all. By the oldest gcc that is served
    (Ubuntu 22.04's), where it is there: what that takes newer ones take."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these are x86's; ARM's are below")
    known = {"avx2", "avxvnni", "amx"}  # AMX's has AVX-512's in it
    if others := sorted(known.difference(native.isas())):
        isas = f"EXO_ISAS={';'.join(others)}"
        options = [isas, "CMAKE_BUILD_TYPE=Debug", FEW_ROWS]
        if oldest := shutil.which("g++-11"):
            options.append(f"CMAKE_CXX_COMPILER={oldest}")
        targets = ["exo_core", *(f"exo_{isa}" for isa in others)]
        build(tmp_path, *options, targets=targets)


def test_what_this_machine_cannot_run_is_right_where_it_is_emulated(tmp_path: Path) -> None:
    """By native/emulated.hpp; AMX's tiles are with the sanitizers."""
    if "avx2" not in native.isas():
        pytest.skip("emulated with AVX2")
    if isas := [f"{isa}_emulated" for isa in ("avx512", "avxvnni") if isa not in native.isas()]:
        check = build(tmp_path, f"EXO_ISAS={';'.join(isas)}", FEW_ROWS, *LITTLE_OPTIMIZED)
        assert run([str(check)]) == "".join(f"{isa}: {DIGEST}\n" for isa in isas)


@pytest.mark.timeout(600)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("gcc's and clang's sanitizers of Linux")
    # The widest vectors, and AMX's tiles, reach farthest past an end.
    isas = {"wide_tiles", *{"neon"}.intersection(native.isas())}
    check = build(tmp_path, "EXO_SANITIZE=ON", f"EXO_ISAS={';'.join(sorted(isas))}")
    digests = dict(line.split(": ") for line in run([str(check)]).splitlines())
    assert digests == dict.fromkeys(isas, DIGEST)


@pytest.mark.timeout(600)
def test_the_kernels_for_arm_are_right_where_one_is_emulated(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not compiler or not emulator:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    check = build(
        tmp_path,
        "CMAKE_SYSTEM_NAME=Linux",
        "CMAKE_SYSTEM_PROCESSOR=aarch64",
        f"CMAKE_CXX_COMPILER={compiler}",
        "CMAKE_EXE_LINKER_FLAGS=-static",
        "EXO_ISAS=armv8;neon;i8mm",
        FEW_ROWS,
        *LITTLE_OPTIMIZED,
    )
    assert run([emulator, str(check), "neon", "i8mm"]) == f"i8mm: {DIGEST}\nneon: {DIGEST}\n"
    # A Raspberry Pi 4: nothing of the other two is run by mistake.
    assert run([emulator, "-cpu", "cortex-a72", str(check)]) == f"armv8: {DIGEST}\n"
