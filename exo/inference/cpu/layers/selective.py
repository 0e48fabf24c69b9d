"""Mamba's layers: which tensors each has, and the native layer made of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.layers.recurrent import convolution
from exo.inference.cpu.packing import Packer, as_list

_NORMS = {"step_norm": "dt_layernorm", "b_norm": "b_layernorm", "c_norm": "c_layernorm"}
"""What the native layer calls them, and what checkpoints do."""


def tensors(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    assert arch.selective_scan is not None
    yield from (f"{prefix}.{name}" for name in ("A_log", "D"))
    if arch.selective_scan.norms == "weighed":
        yield from (f"{prefix}.{name}.weight" for name in _NORMS.values())
    for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"):
        yield from checkpoint.parts(f"{prefix}.{name}")


def build(arch: Architecture, packer: Packer, prefix: str) -> native.SelectiveScan:
    """Raises ModelUnsupported where weights are not what the configuration says."""
    sizes = arch.selective_scan
    assert sizes is not None
    scan = native.SelectiveScan()
    scan.state_dim, scan.norm_eps = sizes.state_dim, sizes.norm_eps
    rows = {
        "x_proj": sizes.rank + 2 * sizes.state_dim,
        "in_proj": 2 * sizes.channels,
        "dt_proj": sizes.channels,
    }
    for name, expected in rows.items():
        found = packer.checkpoint.shape(f"{prefix}.{name}.weight")[0]
        if found != expected:
            raise ModelUnsupported(
                f"{prefix}.{name} has {found} rows; by the configuration it has {expected}"
            )
    scan.x, scan.gate = packer.split(f"{prefix}.in_proj", [sizes.channels] * 2)
    scan.convolution = convolution(packer, f"{prefix}.conv1d")
    scan.step_b_c = packer.matrix(f"{prefix}.x_proj")
    scan.step = packer.matrix(f"{prefix}.dt_proj")
    scan.out = packer.matrix(f"{prefix}.out_proj")
    rates = np.exp(packer.floats(f"{prefix}.A_log")).reshape(-1, 16, sizes.state_dim)
    scan.rates = as_list(rates.swapaxes(1, 2).reshape(-1))
    scan.skip = as_list(packer.floats(f"{prefix}.D").reshape(-1))
    lengths = {"step_norm": sizes.rank, "b_norm": sizes.state_dim, "c_norm": sizes.state_dim}
    for place, name in _NORMS.items():
        if sizes.norms == "weighed":
            setattr(scan, place, as_list(packer.floats(f"{prefix}.{name}.weight")))
        elif sizes.norms == "plain":
            setattr(scan, place, [1.0] * lengths[place])
    return scan
