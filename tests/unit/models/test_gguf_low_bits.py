"""Formats that the `gguf` package does not read: those of PrismML's Bonsai models. The blocks are
read here number by number."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import numpy.typing as npt
import pytest
import zoo
from gguf_checks import cpu_logits
from gguf_files import write_gguf

from exo.inference.cpu.packing import _pack
from exo.models.checkpoint import Tensor
from exo.models.gguf.file import read_gguf
from exo.models.gguf.folder import write_folder
from exo.models.gguf.header import GGUF

Block = npt.NDArray[np.uint8]


def half(block: Block, at: int) -> float:
    return float(block[at : at + 2].copy().view(np.float16)[0])


def one_bit(block: Block) -> list[float]:
    scale = half(block, 0)
    return [scale if block[2 + i // 8] >> i % 8 & 1 else -scale for i in range(128)]


def two_bits(block: Block) -> list[float]:
    count = (len(block) - 2) * 4
    return [(int(block[2 + i // 4] >> i % 4 * 2 & 3) - 1) * half(block, 0) for i in range(count)]


def base_three(block: Block) -> list[float]:
    digits: list[int] = []
    for start, end, count in ((0, 16, 5), (16, 24, 5), (24, 26, 4)):
        for power in range(count):
            digits += [int(byte) * 3**power % 256 * 3 // 256 for byte in block[start:end]]
    return [(digit - 1) * half(block, 26) for digit in digits]


FORMATS: dict[str, tuple[int, int, Callable[[Block], list[float]]]] = {
    "Q1_0": (128, 18, one_bit),
    "Q2_0": (64, 18, two_bits),
    "PQ2_0": (128, 34, two_bits),
    "PTQ1_0": (128, 28, base_three),
}


@pytest.mark.parametrize("name", FORMATS)
def test_both_engines_hold_the_numbers_of_the_file(name: str) -> None:
    import mlx.core as mx

    from exo.inference.mlx.gguf_weights import GROUP, affine

    columns, size, read = FORMATS[name]
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (37, 512 // columns * size), dtype=np.uint8)
    blocks = data.reshape(-1, size)
    at = size - 2 if name == "PTQ1_0" else 0
    of_blocks = rng.uniform(-1, 1, len(blocks)).astype(np.float16)
    blocks[:, at : at + 2] = of_blocks[:, None].view(np.uint8)
    expected = np.array([read(block) for block in blocks], np.float32).reshape(37, 512)
    tensor = Tensor("w", name, (37, 512), data.reshape(-1))
    packed = _pack(None, {"weight": tensor})
    assert np.array_equal(packed.read_rows(np.arange(37, dtype=np.int32)), expected)
    weight, scales, offsets = affine(tensor)
    parts = (mx.array(part) for part in (weight, scales, offsets))
    bits = weight.shape[-1] * 32 // 512
    assert np.array_equal(np.array(mx.dequantize(*parts, group_size=GROUP, bits=bits)), expected)


def write_tensors(file: Path, tensors: dict[str, tuple[int, int, int]]) -> None:
    """A file of tensors [rows, 256] of zeros: type, rows and bytes of each."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0)
    data = b""
    for name, (kind, rows, size) in tensors.items():
        header += string(name) + struct.pack("<IQQIQ", 2, 256, rows, kind, len(data))
        data += bytes(-(-size // 32) * 32)
    header += bytes(-len(header) % 32)
    file.write_bytes(header + data)


def formats(found: GGUF) -> dict[str, tuple[str, int]]:
    return {name: (tensor.format, tensor.nbytes) for name, tensor in found.tensors.items()}


@pytest.mark.parametrize("order", [("a", "b", "n"), ("n", "a", "b"), ("b", "n", "a")])
def test_what_42_stands_for_is_told_by_where_tensors_lie(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    """Q2_0 has 64 columns in a block; in PrismML's first files they were 128."""
    new = {"a": (42, 64, 64 * 72), "b": (42, 2, 2 * 72), "n": (0, 1, 1024)}
    old = {"a": (42, 64, 64 * 68), "b": (42, 2, 2 * 68), "n": (0, 1, 1024)}
    write_tensors(tmp_path / "new.gguf", {name: new[name] for name in order})
    write_tensors(tmp_path / "old.gguf", {name: old[name] for name in order})
    plain = {"n": ("F32", 1024)}
    assert formats(read_gguf(tmp_path / "new.gguf")) == plain | {
        "a": ("Q2_0", 64 * 72),
        "b": ("Q2_0", 2 * 72),
    }
    assert formats(read_gguf(tmp_path / "old.gguf")) == plain | {
        "a": ("PQ2_0", 64 * 68),
        "b": ("PQ2_0", 2 * 68),
    }


def test_a_model_of_one_bit_answers_on_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo.inference.mlx.engine.works", lambda model, start, end: False)
    config = zoo.tiny_config("qwen3") | {"hidden_size": 128, "intermediate_size": 256}
    zoo.write_checkpoint("qwen3", tmp_path / "source", config)

    def blocks(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        groups = numbers.reshape(-1, 128)
        scales = np.abs(groups).mean(axis=1).astype(np.float16)
        bits = np.packbits(groups > 0, axis=1, bitorder="little")
        made = np.concatenate([scales[:, None].view(np.uint8), bits], axis=1)
        return made.reshape(*numbers.shape[:-1], -1)

    def is_packed(numbers: npt.NDArray[np.float32]) -> bool:
        return numbers.ndim == 2 and numbers.shape[-1] % 128 == 0

    def quantize(name: str, numbers: npt.NDArray[np.float32]) -> str:
        return "Q1_0" if is_packed(numbers) else "F32"

    def rounded(name: str, numbers: npt.NDArray[np.float32]) -> str:
        if is_packed(numbers):
            found = [one_bit(block) for block in blocks(numbers).reshape(-1, 18)]
            numbers[...] = np.array(found, np.float32).reshape(numbers.shape)
        return "F32"

    def as_blocks(
        numbers: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType
    ) -> npt.NDArray[np.uint8]:
        return blocks(numbers) if kind.name == "Q1_0" else plain(numbers, kind)

    plain = gguf_files.quantized
    monkeypatch.setattr(gguf_files, "quantized", as_blocks)
    for name, choose in (("packed", quantize), ("rounded", rounded)):
        write_gguf(tmp_path / "source", tmp_path / f"{name}.gguf", choose)
        write_folder([tmp_path / f"{name}.gguf"], tmp_path / name)
    kinds = {tensor.format for tensor in read_gguf(tmp_path / "packed.gguf").tensors.values()}
    assert kinds == {"Q1_0", "F32"}
    found, expected = (cpu_logits(tmp_path / name, [])[-1] for name in ("packed", "rounded"))
    assert zoo.worst_error([found], [expected]) < 1e-4
    [through_mlx, *_] = asyncio.run(zoo.split_logits(tmp_path / "packed", [2], zoo.LAYERS))
    assert zoo.worst_error([through_mlx[0]], [expected]) < 0.05
