"""How MLX quantized a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from exo.errors import ModelUnsupported

_BITS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_USUAL_GROUP = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
_MX = (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))


class Packing(NamedTuple):
    """How a module's weights are stored: `mode` as in `mx.quantize`, or "float8"; `group`: columns
    that share a scale; `scale`: of all, of nvfp4."""

    mode: str
    bits: int
    group: int
    scale: float = 1.0


@dataclass(frozen=True)
class Quantization:
    """How MLX quantized the checkpoint: for all modules, and for some by their path."""

    config: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Quantization:
        return cls(config.get("quantization") or config.get("quantization_config") or {})

    def of_module(self, path: str, words: int, groups: int) -> Packing:
        """Of a module whose rows are `words` 32-bit words and `groups` scales. As in mlx-lm, the
        bits follow from these, the rest from the config.

        Raises:
            ModelUnsupported: a kind of quantization the kernels do not have.
        """
        own = self.config.get(path)
        chosen = own if isinstance(own, Mapping) else self.config
        mode = str(chosen.get("mode", "affine"))
        group = int(chosen.get("group_size") or _USUAL_GROUP.get(mode, 0))
        bits = 32 * words / (groups * group) if group else 0
        is_affine = mode == "affine" and bits in _BITS and group in _GROUPS
        if not is_affine and (mode, bits, group) not in _MX:
            raise ModelUnsupported(
                f"{path} is quantized as {mode}, {bits:g} bits, groups of {group}; the cpu engine "
                f"has affine, {_BITS} bits, groups of {_GROUPS}, mxfp4, mxfp8 and nvfp4"
            )
        return Packing(mode, int(bits), group)
