"""A layer of a checkpoint: which tensors it has, and the native layer made of them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.layers import attention, latent, mlp, recurrent
from exo.inference.cpu.packing import Packer, norm


def tensors_of_layer(
    arch: Architecture, checkpoint: CanonicalCheckpoint, index: int
) -> Iterator[str]:
    """Names of what layer `index` reads."""
    prefix = f"model.layers.{index}"
    for name in arch.family.norms.values():
        yield f"{prefix}.{name}.weight"
    match arch.mixers[index]:
        case "delta_net":
            yield from recurrent.delta_net_tensors(checkpoint, f"{prefix}.linear_attn")
        case "short_convolution":
            yield from recurrent.short_convolution_tensors(checkpoint, f"{prefix}.conv")
        case "attention":
            mixer = latent if arch.latent else attention
            yield from mixer.tensors(arch, checkpoint, f"{prefix}.self_attn")
    of_mlp = mlp.mixture_tensors if index in arch.expert_layers else mlp.tensors
    yield from of_mlp(arch, checkpoint, f"{prefix}.mlp")


def build_layer(arch: Architecture, packer: Packer, index: int, rope: int) -> native.Layer:
    """`rope`: the place of its positions' table among the model's, or -1."""
    prefix = f"model.layers.{index}"
    layer = native.Layer()
    layer.rope, layer.window = rope, arch.windows[index]
    for place, name in arch.family.norms.items():
        setattr(layer, place, norm(arch.family, packer, f"{prefix}.{name}.weight"))
    match arch.mixers[index]:
        case "delta_net":
            layer.delta_net = recurrent.delta_net(arch, packer, f"{prefix}.linear_attn")
        case "short_convolution":
            layer.short_convolution = recurrent.short_convolution(packer, f"{prefix}.conv")
        case "attention":
            mixer = latent if arch.latent else attention
            mixer.build(arch, packer, f"{prefix}.self_attn", layer)
    build_mlp = mlp.build_mixture if index in arch.expert_layers else mlp.build
    build_mlp(arch, packer, f"{prefix}.mlp", layer)
    return layer
