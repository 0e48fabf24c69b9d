"""Any mlx-lm model, cut at layer boundaries, without a copy of its code.

The model keeps its own class, its whole list of layers and its own forward pass; only the class of
each layer object is replaced by a subclass whose call asks `Cut` what to do:

- a layer of an earlier shard returns what that shard's last layer returned over there;
- a layer of this shard runs;
- the last layer of this shard leaves the forward pass with what it returned, by an exception.

MLX is lazy, so what the forward pass builds around this (the embedding on a later shard, the masks)
costs nothing unless this shard's layers reach it, and a tensor is read from the file only when a
result needs it. `n_layers` layers are built and only the shard's are ever in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from exo.errors import InvalidRequest, ModelUnsupported
from exo.inference.mlx import caches as kv
from exo.inference.mlx.absent import Weights, classes_given, depend_on_absent, without
from exo.inference.mlx.boundary import Boundary, as_it_is
from exo.inference.mlx.corrections import check_class, check_packed, correct, forget_computed
from exo.inference.mlx.gguf_weights import GGUFWeights
from exo.inference.mlx.host_linear import is_on_host
from exo.inference.mlx.repacked import Repacked
from exo.inference.mlx.shared_choice import cuts_of_choice
from exo.inference.mlx.trace import (
    TRACE_TOKENS,
    Call,
    arrays_of_unknown_origin,
    boundaries_of,
    crossings,
)
from exo.inference.mlx.turned import turn
from exo.models.description import read_config, text_config
from exo.models.hadamard import Hadamard
from exo.models.quantizers import quantizer_of
from exo.models.tensor_table import absent_tensors, is_gguf

logger = logging.getLogger(__name__)

# What mlx-lm's classes raise on a configuration they do not understand; one of them (olmo) exits
# the process when a package is missing.
_BUILD_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    RuntimeError,
    ImportError,
    FileNotFoundError,
    SystemExit,
)


class _Left(Exception):
    """Carries what the shard's last layer returned out of the model's forward pass."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned


class Cut:
    """What the layers of one model do in the forward pass now running."""

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self.start = 0
        self.end = n_layers
        self.received: Any = None
        self.keep_last = 0
        self.used_caches: set[int] = set()
        self.passive = False  # a model that cannot be cut runs untouched
        self.trace: list[Call] | None = None

    def run_layer(
        self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.trace is not None:
            arguments = as_it_is((*args, *kwargs.values()))
            returned = call(*args, **kwargs)
            self.trace.append(Call(index, arguments, as_it_is(returned)))
            return returned
        if self.passive:
            return call(*args, **kwargs)
        if index < self.start:
            return self.received
        self.used_caches.update(map(id, kv.leaves([*args, *kwargs.values()])))
        returned = call(*args, **kwargs)
        if index + 1 < self.end:
            return returned
        if self.end < self.n_layers or not self.keep_last:
            raise _Left(returned)
        return _last_tokens(returned, self.keep_last)


def _last_tokens(returned: Any, count: int) -> Any:
    """Only the last `count` tokens go on to the final norm and the head."""
    if isinstance(returned, mx.array) and returned.ndim == 3:
        return returned[:, -count:]
    return returned


@cache
def _cut_class(layer_class: Any) -> Any:
    """A subclass that asks the Cut; everything else about the layer stays as it is, so code that
    looks into it (`layer.self_attn`, `layer.use_sliding`) finds what it expects."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = layer_class.__call__.__get__(self)
        return self._exo_cut.run_layer(self._exo_index, run, args, kwargs)

    return type(layer_class.__name__, (layer_class,), {"__call__": call})


class CutModel:
    """A checkpoint whose layers run by range. Its parameters stay lazy until something uses them.

    Raises:
        ModelUnsupported: mlx-lm has no class for it, or the class cannot be built or traced.
    """

    def __init__(
        self, path: Path, dtype: mx.Dtype | None, absent: frozenset[str] | None = None
    ) -> None:
        """`absent`: tensors to do without; None: those that are not here."""
        self._path = path
        self._dtype = dtype
        self._absent = absent_tensors(path) if absent is None else absent
        self._gguf = GGUFWeights(path, dtype) if is_gguf(path) else None
        config = text_config(read_config(path))
        check_class(config)
        self._hadamard = Hadamard.of(config)
        # BitNet's own class reads them as they are, on Metal.
        quantizer = None if config.get("model_type") == "bitnet" else quantizer_of(config)
        if quantizer is not None:
            check_packed(config)
        self._repacked = Repacked(quantizer) if quantizer is not None else None
        self.kv_bits = 16
        """Of the keys and values in new caches: 8, or those that the model computes with."""
        self.model, self.config = self.build()
        found = getattr(self.model, "layers", None)
        if not found:
            raise ModelUnsupported(f"{self.model_type}: mlx-lm's class shows no list of layers")
        self.layers: list[nn.Module] = list(found)
        self.n_layers = len(self.layers)
        self._cut = Cut(self.n_layers)
        for index, layer in enumerate(self.layers):
            kind: Any = type(layer)
            layer.__class__ = _cut_class(kind)
            object.__setattr__(layer, "_exo_cut", self._cut)
            object.__setattr__(layer, "_exo_index", index)
        self._used: dict[tuple[int, int], frozenset[int]] = {}
        """By range of layers, which of the caches' leaves they keep something in."""
        self.boundaries, self.cuts, self.uncuttable = self._trace()
        forget_computed(self.model)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def is_repacked(self) -> bool:
        """Whether weights take another size in memory than in the files."""
        return self._repacked is not None

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model with every parameter still lazy: names and shapes, no data."""
        try:
            # trust_remote_code stays False: a checkpoint never brings code.
            model, config = load_model(
                self._path,
                lazy=True,
                strict=self._gguf is None,
                model_config=self._repacked.config if self._repacked is not None else None,
                get_model_classes=classes_given(self._weights),
            )
        except _BUILD_ERRORS as error:
            raise ModelUnsupported(
                f"mlx-lm cannot build the model in {self._path}: {type(error).__name__}: {error}"
            ) from error
        correct(model, config)
        if self._gguf is not None:
            self._gguf.check(model)
        if self._hadamard is not None:
            turn(model, self._hadamard)
        if self._repacked is not None:
            self._repacked.widen(model)
        if self._dtype is not None:
            model.set_dtype(self._dtype)
        return model, config

    def _weights(self, stored: Weights) -> Weights:
        """What mlx-lm's class is to make of the files' tensors."""
        if self._gguf is not None:
            return self._gguf.stand_ins()
        here = without(stored, self._absent)
        return here if self._repacked is None else self._repacked.weights(here)

    def read_layer(self, index: int, twin: nn.Module | None = None) -> None:
        """Where weights are not lazy of themselves: give a layer its own, or that of `twin`, a
        model of the same."""
        if self._gguf is not None:
            layer = self.layers[index] if twin is None else twin.layers[index]
            self._gguf.read_into(layer, f"{self._layers_prefix}{index}.")

    def keep_of_twin(self, index: int, twin: nn.Module) -> None:
        """Take over from the twin's layer, which was read, what the host did not."""
        if self._gguf is None:
            return
        twins = dict(twin.layers[index].named_modules())
        for name, module in self.layers[index].named_modules():
            moved = ("weight", "scales", "biases") if is_on_host(module) else ()
            for key, value in twins[name].items():
                if isinstance(value, mx.array) and key not in moved:
                    module[key] = value

    def read_outer(self) -> None:
        """The same for embedding, norms and head."""
        if self._gguf is None:
            return
        outer = set(map(id, self.outer_modules()))
        for name, module in self.model.named_modules():
            if id(module) in outer and not module.children():
                self._gguf.read_into(module, f"{name}.")

    @cached_property
    def _layers_prefix(self) -> str:
        """How the names of layers' parameters begin, before the layer's number."""
        first = next(n for n, module in self.model.named_modules() if module is self.layers[0])
        return first.removesuffix("0")

    def new_caches(self) -> list[Any]:
        caches = list(make_prompt_cache(self.model))
        return kv.in_bytes(caches) if self.kv_bits == 8 else caches

    def forward(
        self,
        start: int,
        end: int,
        token_ids: mx.array,
        rows: mx.array | None,
        caches: list[Any],
        *,
        logits: int,
        want_states: bool = False,
    ) -> mx.array | None:
        """Run layers [start, end) over one sequence's tokens, lazily.

        token_ids: int32 [tokens]. rows: what the shard before sent, [tokens, features], None on
        the first shard. Returns [tokens, features], on the last shard [logits, vocabulary] of so
        many of the last tokens, or None there if none are wanted, or where `want_states` what its
        head would read, [tokens, hidden]. `caches` advance by the tokens.

        Raises:
            InvalidRequest: states are wanted of an architecture whose class has no part without
                the head.
        """
        cut = self._cut
        cut.start, cut.end = start, end
        cut.received = self.boundaries[start - 1].unpack(rows) if rows is not None else None
        cut.keep_last = token_ids.size if want_states else logits
        cut.used_caches = set()
        result: mx.array | None
        try:
            if want_states and end == self.n_layers:
                result = self._headless()(token_ids[None], cache=caches)[0]
            else:
                found = self.model(token_ids[None], cache=caches)
                result = found[0, -logits:] if logits else None
        except _Left as left:
            result = self.boundaries[end - 1].pack(left.returned) if end < self.n_layers else None
        finally:
            cut.received = None
        leaves = list(kv.leaves(caches))
        if not cut.passive:
            unused = [i for i, leaf in enumerate(leaves) if id(leaf) not in cut.used_caches]
            self._used[start, end] = frozenset(range(len(leaves))) - frozenset(unused)
            for index in unused:
                kv.advance(leaves[index], token_ids.size)
        return result

    def used_leaves(self, start: int, end: int) -> frozenset[int] | None:
        """Which of the caches' leaves layers [start, end) keep something in, once they ran; None:
        all."""
        return None if self._cut.passive else self._used[start, end]

    def forward_together(
        self,
        start: int,
        end: int,
        token_ids: mx.array,
        rows: mx.array | None,
        caches: list[Any],
    ) -> mx.array:
        """Run layers [start, end) over one token of each of several sequences, lazily.

        token_ids: int32 [sequences]. rows: [sequences, features]. caches: those of the sequences
        side by side (`kv.merged`). Returns [sequences, features], on the last shard [sequences,
        vocabulary].
        """
        cut = self._cut
        cut.start, cut.end, cut.keep_last, cut.used_caches = start, end, 1, set()
        if rows is not None:
            cut.received = self.boundaries[start - 1].unpack(rows, one_of_each=True)
        try:
            result: mx.array = self.model(token_ids[:, None], cache=caches)[:, -1]
        except _Left as left:
            result = self.boundaries[end - 1].pack(left.returned, one_of_each=True)
        finally:
            cut.received = None
        if not cut.passive:
            for leaf in kv.leaves(caches):
                if id(leaf) not in cut.used_caches:
                    kv.advance_together(leaf, token_ids.size)
        return result

    def _headless(self) -> Any:
        """What mlx-lm's classes call `model`: everything below the head."""
        inner = getattr(self.model, "language_model", self.model)
        inner = getattr(inner, "model", None)
        if inner is None:
            raise InvalidRequest(
                f"embeddings are not to be had of {self.model_type}: its class has no part without "
                "the head",
                param="model",
            )
        return inner

    def _trace(self) -> tuple[list[Boundary], frozenset[int] | None, str]:
        """Run the whole model twice on a few tokens, lazily, and watch what passes between layers.

        Returns the boundary after each layer, where the model may be cut (None: everywhere), and
        why not elsewhere.
        """
        caches = self.new_caches()
        first, second = (self._traced(tokens, caches) for tokens in TRACE_TOKENS)
        if [call.index for call in first] != list(range(self.n_layers)):
            why = "it runs its layers more than once, in another order, or not as a whole"
            self._cut.passive = True
            return [], frozenset(), why
        boundaries = boundaries_of(first, second)
        refused = crossings(first, boundaries)
        if next(arrays_of_unknown_origin(first), None) is not None:
            refused |= self._failing_cuts(boundaries)
        if (allowed := cuts_of_choice(self.config)) is not None:
            others = set(range(1, self.n_layers)) - allowed
            refused |= dict.fromkeys(
                others, "layers attend to the tokens that one before them chose"
            )
        refused.pop(0, None)
        refused.pop(self.n_layers, None)
        if not refused:
            return boundaries, None, ""
        cuts = frozenset(range(1, self.n_layers)) - refused.keys()
        return boundaries, cuts, "; ".join(sorted(set(refused.values())))

    def _traced(self, tokens: int, caches: list[Any]) -> list[Call]:
        calls: list[Call] = []
        self._cut.trace = calls
        try:
            self.model(mx.zeros((1, tokens), mx.int32), cache=caches)
        except _BUILD_ERRORS as error:
            raise ModelUnsupported(
                f"{self.model_type}: mlx-lm's forward pass fails: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._cut.trace = None
        return calls

    def _failing_cuts(self, boundaries: list[Boundary]) -> dict[int, str]:
        """Cuts whose second half cannot even be built."""
        self.boundaries = boundaries
        refused = {}
        for cut in range(1, self.n_layers):
            rows = mx.zeros((1, boundaries[cut - 1].features))
            token = mx.zeros((1,), mx.int32)
            try:
                self.forward(cut, self.n_layers, token, rows, self.new_caches(), logits=1)
            except _BUILD_ERRORS as error:
                logger.info("%s cannot be cut at layer %d: %r", self.model_type, cut, error)
                refused[cut] = "later layers need more of earlier ones than the hidden states"
        return refused

    def needs_absent(self, start: int, end: int) -> bool:
        """Whether layers [start, end) would read any of the absent tensors."""
        rows = mx.zeros((1, self.boundaries[start - 1].features)) if start else None
        caches = self.new_caches()
        token = mx.zeros((1,), mx.int32)
        output = self.forward(start, end, token, rows, caches, logits=1)
        layers = [layer.parameters() for layer in self.layers[start:end]]
        return depend_on_absent([output, kv.arrays(caches), layers])

    def reopen(self, path: Path, in_memory: set[int]) -> None:
        """More of the checkpoint is here, in `path`: the stand-ins for its tensors give way to
        these. `in_memory`: layers that are complete already."""
        self._path = path
        if not self._absent:
            return
        self._absent = absent_tensors(path)
        fresh, _ = self.build()
        for index, layer in enumerate(self.layers):
            if index not in in_memory:
                layer.update(fresh.layers[index].parameters())
        forget_computed(self.model)
        inside = {id(module) for layer in fresh.layers for module in layer.modules()}
        own = dict(self.model.named_modules())
        for name, module in fresh.named_modules():
            if id(module) not in inside:
                for key, value in module.items():
                    if isinstance(value, mx.array) and depend_on_absent(own[name].get(key)):
                        own[name][key] = value

    def parameter_bytes(self, index: int) -> int:
        return sum(a.nbytes for _, a in tree_flatten(self.layers[index].parameters()))

    def drop_layers(self, indices: set[int]) -> None:
        """Give back the memory of layers, by putting fresh lazy parameters in their place."""
        fresh, _ = self.build()
        for index in indices:
            self.layers[index].update(fresh.layers[index].parameters())
        forget_computed(self.model)

    def outer_modules(self) -> list[nn.Module]:
        """The modules that belong to no layer: embedding, norms, head."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        return [module for module in self.model.modules() if id(module) not in inside]
