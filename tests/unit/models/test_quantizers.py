"""What GPTQ, AWQ and compressed-tensors pack themselves is read back, with numpy and with MLX.

packed_by_their_tools.json holds layers of 32 x 64 that each tool's own code packed (AutoGPTQ's
QuantLinear.pack, AutoAWQ's WQLinear_GEMM.from_linear, compressed-tensors' pack_to_int32), and the
values, zeros and scales that it was given.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from exo.models.quantizers import Affine, quantizer_of

CASES = json.loads((Path(__file__).parents[2] / "packed_by_their_tools.json").read_text())


def array(stored: dict[str, Any]) -> npt.NDArray[Any]:
    data = np.frombuffer(base64.b64decode(stored["data"]), stored["dtype"])
    return data.reshape(stored["shape"])


def values_of(layer: Affine) -> npt.NDArray[np.int64]:
    octets = np.ascontiguousarray(np.array(layer.words)).view(np.uint8)
    bits = np.unpackbits(octets, axis=1, bitorder="little").reshape(len(octets), -1, layer.bits)
    return (bits.astype(np.int64) << np.arange(layer.bits)).sum(-1)


def name(case: dict[str, Any]) -> str:
    return f"{case['tool']}, {case['quantization_config'].get('bits', '')}"


@pytest.mark.parametrize("xp", [np, mx], ids=["numpy", "mlx"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_what_a_tool_packed_is_read_back(case: dict[str, Any], xp: Any) -> None:
    quantizer = quantizer_of({"quantization_config": case["quantization_config"]})
    assert quantizer is not None
    parts = {part: array(stored) for part, stored in case["parts"].items()}
    quantizer.check("layer", {part: stored.shape for part, stored in parts.items()})
    layer = quantizer.unpacked({part: xp.array(stored) for part, stored in parts.items()}, xp)
    assert isinstance(layer, Affine)
    values, zeros, scales = (array(case[key]) for key in ("values", "zeros", "scales"))
    assert layer.group == values.shape[1] // scales.shape[1]
    assert np.array_equal(values_of(layer), values)
    assert np.array_equal(np.array(layer.scales), scales.astype(np.float32))
    assert np.array_equal(np.array(layer.offsets), -scales.astype(np.float32) * zeros)
