"""GLM 5.2: layers that attend to the tokens which the indexer of a layer before them chose, as
`indexer_types` in its configuration says. mlx-lm's class of GLM 5 gives each layer an indexer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.deepseek_v32 import Indexer


class _Choosing(Indexer):
    """Remembers what it chose in the step now running."""

    def __call__(self, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> Any:
        chosen = super().__call__(x, qr, mask, cache=cache)
        object.__setattr__(self, "_exo_chosen", chosen)
        return chosen


class _TakingOver(nn.Module):
    """In an indexer's place: what another one chose."""

    def __init__(self, choosing: _Choosing) -> None:
        super().__init__()
        object.__setattr__(self, "_exo_from", choosing)

    def __call__(self, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> Any:
        if cache is not None:  # of an indexer's keys, which counts tokens
            thin = mx.zeros((x.shape[0], 1, x.shape[1], 1), x.dtype)
            cache.update_and_fetch(thin, thin)
        return self._exo_from._exo_chosen


def _layers_that_choose(config: Mapping[str, Any]) -> frozenset[int] | None:
    kinds = config.get("indexer_types")
    if config.get("model_type") != "glm_moe_dsa" or not kinds or set(kinds) == {"full"}:
        return None
    return frozenset(i for i, kind in enumerate(kinds) if kind == "full")


def share_choice(
    model: nn.Module, config: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Make a model what its configuration says, before it is given weights; those that it has a
    place for are returned."""
    choosing = _layers_that_choose(config)
    if choosing is None:
        return dict(weights)
    source: Any = None
    for index, layer in enumerate(model.layers):
        if index in choosing:
            source = layer.self_attn.indexer
            source.__class__ = _Choosing
        else:
            layer.self_attn.indexer = _TakingOver(source)
    unread = unread_weights(config)
    return {name: array for name, array in weights.items() if not name.startswith(unread)}


def unread_weights(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of weights begin that no layer has a place for."""
    choosing = _layers_that_choose(config)
    if choosing is None:
        return ()
    layers = range(int(config["num_hidden_layers"]))
    return tuple(f"model.layers.{i}.self_attn.indexer." for i in layers if i not in choosing)


def cuts_of_choice(config: Mapping[str, Any]) -> frozenset[int] | None:
    """Before which layers it may be cut: those that choose for themselves. None: before any."""
    choosing = _layers_that_choose(config)
    return None if choosing is None else choosing - {0}
