"""A layer of a checkpoint: which tensors it has, and the native layer made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.layers import (
    alt_up,
    attention,
    compressed,
    experts,
    hyper,
    latent,
    mixture,
    mlp,
    ngrams,
    recurrent,
    selective,
    token_input,
)
from exo.inference.cpu.layers.experts import ExpertReader
from exo.inference.cpu.packing import Packer, as_list, norm


def tensors_of_layer(
    arch: Architecture, checkpoint: CanonicalCheckpoint, index: int, with_experts: bool = True
) -> Iterator[str]:
    """Names of what layer `index` reads."""
    modules = arch.family.modules
    prefix = f"model.layers.{index}"
    for name in _norms(arch, checkpoint, index).values():
        yield f"{prefix}.{name}.weight"
        if arch.family.layer_norm and f"{prefix}.{name}.bias" in checkpoint:
            yield f"{prefix}.{name}.bias"
    for mixer in arch.mixers[index].split("+"):
        module = f"{prefix}.{modules.get(mixer)}"
        match mixer:
            case "delta_net":
                yield from recurrent.delta_net_tensors(checkpoint, module)
            case "kimi_delta_net":
                yield from recurrent.kimi_delta_net_tensors(checkpoint, module)
            case "short_convolution":
                yield from recurrent.short_convolution_tensors(checkpoint, module)
            case "state_space":
                yield from recurrent.state_space_tensors(arch, checkpoint, module)
            case "selective_scan":
                yield from selective.tensors(arch, checkpoint, module)
            case "attention":
                yield from _attention(arch).tensors(arch, checkpoint, module, index)
    if index in arch.mlp_layers:
        of_mlp = mixture.tensors if index in arch.expert_layers else mlp.tensors
        yield from of_mlp(arch, checkpoint, f"{prefix}.{modules['mlp']}")
    if index in arch.expert_layers:
        yield from (f"{prefix}.{name}.weight" for name in arch.family.mixture_norms.values())
    if arch.token_input_dim:
        yield from token_input.tensors(checkpoint, prefix)
    if arch.alt_up:
        yield from alt_up.tensors(arch, checkpoint, prefix)
    if arch.family.layer_scales and f"{prefix}.layer_scalar" in checkpoint:
        yield f"{prefix}.layer_scalar"
    if arch.hyper:
        yield from hyper.tensors(checkpoint, prefix, arch.hyper)
    if arch.ngrams and arch.ngrams.layer == index:
        yield from ngrams.tensors(checkpoint, f"{prefix}.ple")
    if with_experts:
        yield from expert_tensors_of_layer(arch, checkpoint, index)


def tensors_read_later(
    arch: Architecture, checkpoint: CanonicalCheckpoint, index: int
) -> Iterator[str]:
    """Names of what stays where it is, and steps ask for."""
    if arch.ngrams and arch.ngrams.layer == index:
        yield from ngrams.table_tensors(checkpoint)


def _attention(arch: Architecture) -> ModuleType:
    return compressed if arch.compressed else latent if arch.latent else attention


def expert_tensors_of_layer(
    arch: Architecture, checkpoint: CanonicalCheckpoint, index: int
) -> Iterator[str]:
    """Of a mixture what the experts read that only some tokens go through."""
    if index in arch.expert_layers:
        yield from experts.tensors(arch, checkpoint, _mlp_prefix(arch, index))


def check_table_of_layer(arch: Architecture, checkpoint: CanonicalCheckpoint, index: int) -> None:
    """Raises ModelUnsupported where what several tokens bring is not as its configuration says."""
    if arch.ngrams and arch.ngrams.layer == index:
        ngrams.check(checkpoint, f"model.layers.{index}.ple", arch.ngrams)


def check_experts_of_layer(arch: Architecture, checkpoint: CanonicalCheckpoint, index: int) -> None:
    """Raises ModelUnsupported where a mixture has more experts than its configuration says."""
    experts.check(arch, checkpoint, _mlp_prefix(arch, index))


def _mlp_prefix(arch: Architecture, index: int) -> str:
    return f"model.layers.{index}.{arch.family.modules['mlp']}"


def unread_tensors(
    arch: Architecture, checkpoint: CanonicalCheckpoint, index: int
) -> Iterator[str]:
    """Names of what is there for layer `index`, and that nothing reads."""
    if arch.latent and arch.latent.most and index not in arch.latent.choosing:
        module = f"model.layers.{index}.{arch.family.modules['attention']}"
        yield from latent.indexer_tensors(checkpoint, module)
    if arch.kv_from[index] != index:
        module = f"model.layers.{index}.{arch.family.modules['attention']}"
        for name in ("k_proj", "v_proj", "k_norm"):
            yield from checkpoint.parts(f"{module}.{name}")


def build_layer(
    arch: Architecture, packer: Packer, index: int, rope: int, lasting: Callable[[], Packer]
) -> native.Layer:
    """All but the experts of a mixture. `rope`: the place of its positions' table among the
    model's, or -1. `lasting` gives a packer for what is read later."""
    modules = arch.family.modules
    prefix = f"model.layers.{index}"
    layer = native.Layer()
    layer.rope, layer.window = rope, arch.windows[index]
    layer.in_chunks = arch.family.in_chunks and layer.window > 0
    if growth := arch.query_growth[index]:
        layer.query_growth, layer.query_span = growth.rate, growth.span
        layer.query_ahead = growth.ahead
    norms = _norms(arch, packer.checkpoint, index)
    for place, name in norms.items():
        setattr(layer, place, norm(arch.family, packer, f"{prefix}.{name}.weight"))
        if arch.family.layer_norm and f"{prefix}.{name}.bias" in packer.checkpoint:
            setattr(layer, f"{place}_bias", as_list(packer.floats(f"{prefix}.{name}.bias")))
    layer.parallel = arch.parallel
    if arch.parallel and "mlp_norm" not in norms:
        layer.mlp_norm, layer.mlp_norm_bias = layer.attention_norm, layer.attention_norm_bias
    for mixer in arch.mixers[index].split("+"):
        module = f"{prefix}.{modules.get(mixer)}"
        match mixer:
            case "delta_net":
                layer.delta_net = recurrent.delta_net(arch, packer, module)
            case "kimi_delta_net":
                layer.delta_net = recurrent.kimi_delta_net(arch, packer, module)
            case "short_convolution":
                layer.short_convolution = recurrent.short_convolution(packer, module)
            case "state_space":
                layer.state_space = recurrent.state_space(arch, packer, module)
            case "selective_scan":
                layer.selective_scan = selective.build(arch, packer, module)
            case "attention":
                _attention(arch).build(arch, packer, module, layer, index)
    if index in arch.mlp_layers:
        build_mlp = mixture.build if index in arch.expert_layers else mlp.build
        build_mlp(arch, packer, f"{prefix}.{modules['mlp']}", layer)
    if index in arch.expert_layers and arch.family.mixture_norms:
        layer.mixture_norms = native.MixtureNorms()
        router = packer.floats(f"{prefix}.{modules['mlp']}.router.scale")
        layer.mixture_norms.router = as_list(router * np.float32(arch.hidden**-0.5))
        for place, name in arch.family.mixture_norms.items():
            setattr(layer.mixture_norms, place, as_list(packer.floats(f"{prefix}.{name}.weight")))
    if arch.token_input_dim:
        layer.token_input = token_input.build(packer, prefix)
    if arch.alt_up:
        layer.alt_up = alt_up.build(arch, packer, prefix)
    if arch.hyper:
        for place, connection in hyper.build(packer, prefix, arch.hyper).items():
            setattr(layer, place, connection)
    if arch.ngrams and arch.ngrams.layer == index:
        layer.ngrams = ngrams.build(packer, lasting(), f"{prefix}.ple", arch.ngrams)
    if (deviations := arch.sparsity[index]) is not None:
        layer.sparse, layer.deviations = True, deviations
    layer.expert_limit, layer.limit = arch.limits[index]
    if arch.family.layer_scales and f"{prefix}.layer_scalar" in packer.checkpoint:
        layer.scale = float(packer.floats(f"{prefix}.layer_scalar")[0])
    return layer


def expert_reader(arch: Architecture, packer: Packer, index: int) -> ExpertReader:
    return ExpertReader(arch, packer, _mlp_prefix(arch, index))


def _norms(arch: Architecture, checkpoint: CanonicalCheckpoint, index: int) -> dict[str, str]:
    """Of the parts that the layer has: the native layer's name of a norm, and the checkpoint's.
    Beside an attention an MLP has one of its own, or reads the attention's."""

    def is_there(place: str, name: str) -> bool:
        if "mlp" not in place:
            return arch.mixers[index] != "nothing"
        shares = arch.parallel and f"model.layers.{index}.{name}.weight" not in checkpoint
        return index in arch.mlp_layers and not shares

    return {place: name for place, name in arch.family.norms.items() if is_there(place, name)}
