"""A GGUF file, whoever wrote it."""

from __future__ import annotations

import mmap
from pathlib import Path

from exo.errors import ModelUnsupported
from exo.models.gguf.header import ENDS_TOO_SOON, GGUF, parse_header
from exo.models.gguf.ollama import as_llama_cpp_writes


def read_gguf(path: Path) -> GGUF:
    """Read a file's header.

    Raises:
        ModelUnsupported: it is no GGUF file, damaged, not whole, or holds tensors of formats that
            exo does not read; the message says which.
    """
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        with data:
            return parse_gguf(path, data, len(data))
    except (*ENDS_TOO_SOON, OSError) as error:
        raise ModelUnsupported(
            f"{path} is not a GGUF file, or not a whole one ({error}); fetch it again"
        ) from error


def parse_gguf(path: Path, data: bytes | mmap.mmap, size: int) -> GGUF:
    """The header of a file of `size` bytes that `data` begins. Raises as `parse_header`."""
    return as_llama_cpp_writes(parse_header(path, data, size))
