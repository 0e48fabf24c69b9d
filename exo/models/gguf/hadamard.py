"""What turns the activations of a GGUF file whose weights are stored turned (Bonsai 2)."""

from __future__ import annotations

import re

from exo.errors import ModelUnsupported
from exo.models.gguf.header import GGUF
from exo.models.hadamard import Hadamard
from exo.models.prism import said_in

_ARCHITECTURES = ("llama", "qwen3", "qwen35")
_UNTURNED = re.compile(r"\.(ssm_alpha|ssm_beta)\.weight$")
_EMBEDDING = "token_embd.weight"


def hadamard_of(gguf: GGUF, layers: int) -> Hadamard | None:
    """Of a file's `layers` layers and its head; None: nothing turns.

    Raises:
        ModelUnsupported: something else is said than exo computes, or some weights are turned and
            others are not: half of it would be nonsense.
    """
    said = said_in(gguf.metadata)
    if said is None:
        return None
    if gguf.architecture not in _ARCHITECTURES:
        raise ModelUnsupported(
            f"turned weights (prism.hadamard) of {gguf.architecture!r}; exo reads those of "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if gguf.architecture == "qwen35" and not said.grouped:
        raise ModelUnsupported("turned weights whose value heads are not grouped (gdn_v_grouped)")
    wide = {
        name: tensor.shape[-1]
        for name, tensor in gguf.tensors.items()
        if len(tensor.shape) > 1 and name.endswith(".weight") and _is_read(name, layers)
    }
    widths = {wide[name] for name in (said.turned | said.inverse) & set(wide)}
    is_head_apart = "output.weight" in gguf.tensors
    for name, width in wide.items():
        is_turned = name in (said.inverse if name == _EMBEDDING else said.turned)
        may_differ = _UNTURNED.search(name) or (name == _EMBEDDING and is_head_apart)
        if width in widths and not is_turned and not may_differ:
            raise ModelUnsupported(f"{name} is not turned and others are (prism.hadamard)")
    return said.hadamard(sorted(widths), _EMBEDDING)


def _is_read(name: str, layers: int) -> bool:
    layer = re.match(r"blk\.(\d+)\.", name)
    return layer is None or int(layer[1]) < layers
