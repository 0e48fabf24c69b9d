"""Queries, keys and values that stand in one tensor of a GGUF file, one after the other, as three.

llama.cpp's converter joins them for whoever asks (`--fuse-qkv`), and for some architectures always.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from exo.errors import ModelUnsupported
from exo.models.gguf.families.family import Config, GGUFFamily
from exo.models.gguf.header import GGUFTensor

_FUSED = re.compile(r"(blk\.(\d+)\.)attn_qkv\.(.+)")


def separated(
    tensors: Mapping[str, GGUFTensor], family: GGUFFamily, config: Config
) -> dict[str, GGUFTensor]:
    """The tensors of a file, by GGUF's names, with those joined that mlx-lm's class has apart.

    Raises:
        ModelUnsupported: a tensor has not as many rows as the heads.
    """
    found: dict[str, GGUFTensor] = {}
    for name, tensor in tensors.items():
        fused = _FUSED.fullmatch(name)
        rows = family.qkv_rows(config, int(fused[2])) if fused else None
        if fused is None or rows is None:
            found[name] = tensor
            continue
        parts = [tensor] * 3  # of NVFP4: one number for all rows
        if not fused[3].endswith("scale"):
            parts = _cut(name, tensor, rows)
        for part, letter in zip(parts, "qkv", strict=True):
            found[f"{fused[1]}attn_{letter}.{fused[3]}"] = part
    return found


def _cut(name: str, tensor: GGUFTensor, rows: tuple[int, int, int]) -> list[GGUFTensor]:
    if sum(rows) != tensor.shape[0]:
        raise ModelUnsupported(
            f"the GGUF file's {name} has {tensor.shape[0]} rows; by the numbers of heads it has "
            f"{sum(rows)}"
        )
    width = tensor.nbytes // tensor.shape[0]
    parts, start = [], 0
    for count in rows:
        shape = (count, *tensor.shape[1:])
        offset = tensor.offset + start * width
        parts.append(replace(tensor, shape=shape, offset=offset, nbytes=count * width))
        start += count
    return parts
