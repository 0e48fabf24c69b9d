"""What GGUF files of PrismML (Bonsai 2) say of weights that are stored turned.

Format: https://github.com/ggml-org/llama.cpp/issues/29058.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from exo.errors import ModelUnsupported
from exo.models.gguf.header import GGUF
from exo.models.hadamard import Hadamard

_ARCHITECTURES = ("llama", "qwen3", "qwen35")
_UNTURNED = re.compile(r"\.(ssm_alpha|ssm_beta)\.weight$")
_EMBEDDING = "token_embd.weight"
_WANTED = {
    "version": 1,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
}


def hadamard_of(gguf: GGUF, layers: int) -> Hadamard | None:
    """What turns the activations of a file's `layers` layers and its head; None: nothing does.

    Raises:
        ModelUnsupported: something else is said than exo computes, or some weights are turned and
            others are not: half of it would be nonsense.
    """

    def said(key: str, default: Any = None) -> Any:
        return gguf.metadata.get(f"prism.hadamard.{key}", default)

    if said("version") is None:
        return None
    for key, wanted in _WANTED.items():
        if said(key) != wanted:
            raise ModelUnsupported(f"prism.hadamard.{key} is {said(key)!r}; exo reads {wanted!r}")
    if gguf.architecture not in _ARCHITECTURES:
        raise ModelUnsupported(
            f"turned weights (prism.hadamard) of {gguf.architecture!r}; exo reads those of "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if gguf.architecture == "qwen35" and not said("gdn_v_grouped", False):
        raise ModelUnsupported("turned weights whose value heads are not grouped (gdn_v_grouped)")
    turned, inverse = set(said("weight_names", [])), set(said("inverse_weight_names", []))
    wide = {
        name: tensor.shape[-1]
        for name, tensor in gguf.tensors.items()
        if len(tensor.shape) > 1 and name.endswith(".weight") and _is_read(name, layers)
    }
    block = int(said("block_size", 0))
    widths = {wide[name] for name in (turned | inverse) & set(wide)}
    signs = _signs(said, widths)
    for width, own in signs.items():
        if block < 1 or block & (block - 1) or width % block or len(own) != width:
            raise ModelUnsupported(f"a Hadamard matrix of {block} for {width} columns")
    is_head_apart = "output.weight" in gguf.tensors
    for name, width in wide.items():
        is_turned = name in (inverse if name == _EMBEDDING else turned)
        may_differ = _UNTURNED.search(name) or (name == _EMBEDDING and is_head_apart)
        if width in signs and not is_turned and not may_differ:
            raise ModelUnsupported(f"{name} is not turned and others are (prism.hadamard)")
    return Hadamard(block, signs, _EMBEDDING in inverse)


def _is_read(name: str, layers: int) -> bool:
    layer = re.match(r"blk\.(\d+)\.", name)
    return layer is None or int(layer[1]) < layers


def _signs(said: Any, widths: set[int]) -> dict[int, np.ndarray[Any, np.dtype[np.float32]]]:
    mode = said("sign_mode")
    if mode == "identity":
        return {width: np.ones(width, np.float32) for width in widths}
    if mode != "explicit":
        raise ModelUnsupported(f"prism.hadamard.sign_mode is {mode!r}")
    known = [int(width) for width in np.atleast_1d(said("sign_widths", []))]
    values = np.asarray(said("sign_values", []), np.float32)
    if sum(known) != len(values) or not np.isin(values, (-1, 1)).all() or widths - set(known):
        raise ModelUnsupported("signs (prism.hadamard.sign_values) that do not fit the weights")
    ends = np.cumsum(known)
    return {w: values[end - w : end] for w, end in zip(known, ends, strict=True) if w in widths}
