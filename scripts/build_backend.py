"""The build backend: scikit-build-core, and never without a result.

The kernels of the cpu engine need a C++20 compiler. Where the machine has none, PyPI's `ziglang`
brings a clang; where that fails too, the package is built without kernels, exo runs on MLX and says
at start what is missing. EXO_NATIVE=required (CI, release wheels) makes such a failure fatal.

A wheel holds the kernels of every instruction set, as it goes to other machines. With EXO_ISAS=own
a build has the best that this machine runs, and the portable ones that the others are tested
against; with EXO_ISAS=runnable all that it runs: compiling all takes minutes on two cores. With
EXO_ISAS=tested too, but of those only the best for speed: the others take half the time.
EXO_ZIG_TARGET (scripts/build_wheels) builds with zig for another C library or processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scikit_build_core import build as scikit
from scikit_build_core.build import (  # noqa: F401  (hooks of PEP 517)
    build_sdist,
    get_requires_for_build_sdist,
)

Settings = dict[str, Any] | None

_ZIG_CALLS_IT = """for flag do
  shift
  case $flag in
    -march=armv8.2-a+fp16*) flag=-mcpu=generic+v8_2a+fullfp16${flag#-march=armv8.2-a+fp16} ;;
    -march=armv8-a) flag=-mcpu=generic ;;
  esac
  set -- "$@" "$flag"
done
"""
"""ARM's instruction sets have other names in zig's compiler than in gcc and clang."""


_NEW_ENOUGH = b"""
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 11
#error
#elif defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ < 14
#error
#endif
"""
"""The oldest that were tried."""


def has_compiler() -> bool:
    """Whether the C++ compiler that CMake would find runs and is new enough."""
    known = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
    found = next((command for command in known if command and shutil.which(command[0])), None)
    if found is None:
        return False
    read = [*found, "-x", "c++", "-std=gnu++20", "-fsyntax-only", "-"]
    return subprocess.run(read, input=_NEW_ENOUGH, capture_output=True, check=False).returncode == 0


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*scikit.get_requires_for_build_wheel(config_settings), *_zig()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*scikit.get_requires_for_build_editable(config_settings), *_zig()]


def _zig() -> list[str]:
    """A compiler as a requirement of the build, where there is none and PyPI has one."""
    if os.environ.get("EXO_ZIG_TARGET"):
        return ["ziglang"]
    known = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
    return ["ziglang"] if known and not has_compiler() else []


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    return _build(scikit.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    return _build(scikit.build_editable, wheel_directory, config_settings, metadata_directory)


def runnable_isas() -> list[str]:
    """Which of native/CMakeLists.txt's instruction sets this machine can run, the best one last;
    empty, for all, where that is not known."""
    try:
        known = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    lines = [line for line in known.splitlines() if line.startswith(("flags", "Features"))]
    if not lines:
        return []
    flags = set(lines[0].split())
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
    armv8 = {"asimd"}
    neon = armv8 | {"asimdhp", "asimddp"}
    wanted = {
        "avx2": avx2,
        "avxvnni": avx2 | {"avx_vnni"},
        "avx512": avx512,
        "armv8": armv8,
        "neon": neon,
        "i8mm": neon | {"i8mm"},
    }
    found = ["portable", *(isa for isa, needed in wanted.items() if needed <= flags)]
    tiles = {"amx_tile", "amx_int8"} | avx512 <= flags and _may_use_tiles()
    return [*found, "amx"] if tiles else found


def own_isas() -> list[str]:
    """The portable ones and the best."""
    found = runnable_isas()
    return [*found[:1], *found[1:][-1:]]


def _may_use_tiles() -> bool:
    """Whether the kernel lets a process use AMX's tiles, as the engine will ask it to."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def _build(build: Callable[..., str], folder: str, settings: Settings, metadata: str | None) -> str:
    kind = os.environ.get("EXO_ISAS", "")
    chosen = {"own": own_isas, "runnable": runnable_isas, "tested": runnable_isas}.get(kind)
    isas = chosen() if chosen else []
    for_speed = isas[-1] if isas and kind == "tested" else ""
    defines = {"EXO_ISAS": ";".join(isas), "EXO_FOR_SPEED": for_speed}
    settings = {**(settings or {}), **{f"cmake.define.{k}": v for k, v in defines.items()}}
    if os.environ.get("EXO_NATIVE") == "required":
        with _compiler():
            return build(folder, settings, metadata)
    try:
        with _compiler():
            return build(folder, settings, metadata)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever a compiler may do)
        print(f"exo: built without its CPU kernels: {error}", file=sys.stderr)
        return build(folder, {**settings, "wheel.cmake": "false"}, metadata)


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """The machine's compiler, or zig's in the environment for as long as the build runs."""
    target = os.environ.get("EXO_ZIG_TARGET", "")
    if not target and has_compiler():
        yield
        return
    import ziglang  # noqa: F401  (fails here, with its name, where it could not be had)

    target = target or f"{platform.machine()}-linux-{'musl' if 'musl' in _host() else 'gnu'}"
    # Debian's Python.h includes another header by its place in /usr/include; zig looks elsewhere.
    headers = shlex.quote(str(Path(sysconfig.get_path("include")).parent))
    with tempfile.TemporaryDirectory() as folder:
        compile_ = f"c++ -target {target} -idirafter {headers}"
        wrappers = {"CXX": compile_, "AR": "ar", "RANLIB": "ranlib"}
        for variable, command in wrappers.items():
            wrapper = Path(folder) / f"zig-{variable.lower()}"
            run = f'exec "{sys.executable}" -m ziglang {command} "$@"\n'
            wrapper.write_text(f"#!/bin/sh\n{_ZIG_CALLS_IT}{run}")
            wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
            os.environ[variable] = str(wrapper)
        try:
            yield
        finally:
            for variable in wrappers:
                del os.environ[variable]


def _host() -> str:
    return str(sysconfig.get_config_var("HOST_GNU_TYPE") or "")
