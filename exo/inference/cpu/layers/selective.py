"""Mamba's layers: which tensors each has, and the native layer made of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.families.selective import SelectiveScan
from exo.inference.cpu.layers.recurrent import convolution
from exo.inference.cpu.packing import Packer, as_list


def tensors(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    assert arch.selective_scan is not None
    yield from (f"{prefix}.{name}" for name in ("A_log", "D"))
    if arch.selective_scan.norms == "weighed":
        yield from (f"{prefix}.{name}.weight" for _, name, _ in _norms(arch.selective_scan))
    for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"):
        yield from checkpoint.parts(f"{prefix}.{name}")


def build(arch: Architecture, packer: Packer, prefix: str) -> native.SelectiveScan:
    """Raises ModelUnsupported where weights are not what the configuration says."""
    sizes = arch.selective_scan
    assert sizes is not None
    scan = native.SelectiveScan()
    scan.state_dim, scan.norm_eps = sizes.state_dim, sizes.norm_eps
    scan.x, scan.gate = packer.split(f"{prefix}.in_proj", [sizes.channels] * 2)
    scan.convolution = convolution(packer, f"{prefix}.conv1d")
    scan.step_b_c = packer.matrix(f"{prefix}.x_proj")
    scan.step = packer.matrix(f"{prefix}.dt_proj")
    scan.out = packer.matrix(f"{prefix}.out_proj")
    rates, skip = packer.floats(f"{prefix}.A_log"), packer.floats(f"{prefix}.D")
    made = sizes.rank + 2 * sizes.state_dim
    found = {
        "in_proj": ((scan.x.rows, scan.gate.rows), (sizes.channels, sizes.channels)),
        "conv1d": (packer.checkpoint.shape(f"{prefix}.conv1d.weight")[:1], (sizes.channels,)),
        "x_proj": ((scan.step_b_c.rows, scan.step_b_c.cols), (made, sizes.channels)),
        "dt_proj": ((scan.step.rows, scan.step.cols), (sizes.channels, sizes.rank)),
        "A_log": (rates.shape, (sizes.channels, sizes.state_dim)),
        "D": ((skip.size,), (sizes.channels,)),
    }
    for place, name, length in _norms(sizes):
        weights = np.ones(length, np.float32)
        if sizes.norms == "weighed":
            weights = packer.floats(f"{prefix}.{name}.weight")
            found[name] = (weights.shape, (length,))
        if sizes.norms:
            setattr(scan, place, as_list(weights))
    for name, (own, told) in found.items():
        if own != told:
            raise ModelUnsupported(f"{prefix}.{name} is {own}; by the configuration it is {told}")
    lanes = np.exp(rates).reshape(-1, 16, sizes.state_dim).swapaxes(1, 2)
    scan.rates = as_list(lanes.reshape(-1))
    scan.skip = as_list(skip.reshape(-1))
    return scan


def _norms(sizes: SelectiveScan) -> list[tuple[str, str, int]]:
    """What the native layer calls them, what checkpoints do, and their lengths."""
    return [
        ("step_norm", "dt_layernorm", sizes.rank),
        ("b_norm", "b_layernorm", sizes.state_dim),
        ("c_norm", "c_layernorm", sizes.state_dim),
    ]
