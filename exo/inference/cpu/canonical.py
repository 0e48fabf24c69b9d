"""A checkpoint's tensors by the names they would have in a llama."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from exo.models.checkpoint import Checkpoint, Tensor
from exo.models.gguf.names import TENSOR_SCALE
from exo.models.quantizers import Quantizer

_OTHER_SENSES = re.compile(
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower"
    r"|embed_vision|embed_audio|vision_embedder)\."
)
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|^(language_model\.)?(model\.)?mtp(_layers)?\.|\.[kv]_scale$|\.output_scale$"
    r"|\.(in|out)put_(min|max)$|\.attention\.(masked_)?bias$"
)
"""What is computed otherwise (positions, masks), what guesses several tokens at once, and how
others than exo would pack a KV cache."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WRAPPED = "model.language_model."


class CanonicalCheckpoint:
    """`renames`: parts of dotted paths, and what to read instead. `unread_layers` are as if they
    were not there. A layer's weight is called so, whatever the tool calls it that packed it.
    `check` raises EngineFailed where what was read was not there any more."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        renames: Mapping[str, str],
        unread_layers: range,
        quantizer: Quantizer | None,
        check: Callable[[], None],
    ) -> None:
        self.quantizer = quantizer
        self.check = check
        self._checkpoint = checkpoint
        self._renames = {f".{old}.": f".{new}." for old, new in renames.items()}
        self._own: dict[str, str] = {}
        for name in checkpoint.names():
            if _OTHER_SENSES.search(name) or _IGNORED.search(name):
                continue
            known = self._renamed(name)
            layer = _LAYER.match(known)
            if layer is None or int(layer[1]) not in unread_layers:
                self._own[known] = name

    def _renamed(self, name: str) -> str:
        if name.startswith(_WRAPPED):
            name = f"model.{name.removeprefix(_WRAPPED)}"
        name = name.removeprefix("language_model.")
        dotted = f".{name}."
        for old, new in self._renames.items():
            dotted = dotted.replace(old, new)
        found = dotted[1:-1]
        if self.quantizer is not None and found.endswith(f".{self.quantizer.weight}"):
            found = found.removesuffix(self.quantizer.weight) + "weight"
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._own

    @cached_property
    def is_raw(self) -> bool:
        """Whether it is as it was trained: mlx-lm turns the axes of its convolutions, and calls
        Step's mixtures otherwise."""
        convolutions = (name for name in self._own if name.endswith("conv1d.weight"))
        is_turned = any(self.shape(name)[-1] != 1 for name in convolutions)
        return is_turned or any(".moe." in name for name in self._own.values())

    def names(self) -> list[str]:
        return list(self._own)

    def own_name(self, name: str) -> str:
        """What the checkpoint calls it."""
        return self._own.get(name, name)

    def own_module(self, module: str) -> str:
        """What the checkpoint calls the module of a weight."""
        return self.own_name(f"{module}.weight").removesuffix(".weight")

    def dtype(self, name: str) -> str:
        return self._checkpoint.dtype(self.own_name(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self.own_name(name))

    def nbytes(self, name: str) -> int:
        return self._checkpoint.nbytes(self.own_name(name))

    def tensor(self, name: str) -> Tensor:
        """Raises ModelUnsupported if there is none of that name."""
        return self._checkpoint.tensor(self.own_name(name))

    def read_ahead(self, name: str, part: int = 0, parts: int = 1) -> None:
        self._checkpoint.read_ahead(self.own_name(name), part, parts)

    def expect_rows(self, name: str) -> None:
        self._checkpoint.expect_rows(self.own_name(name))

    def read_rows_ahead(self, name: str, rows: Iterable[int]) -> None:
        self._checkpoint.read_rows_ahead(self.own_name(name), rows)

    def give_back(self, name: str, part: int = 0, parts: int = 1) -> None:
        self._checkpoint.give_back(self.own_name(name), part, parts)

    def parts(self, module: str) -> list[str]:
        """The tensors that a linear layer or an embedding consists of."""
        parts = ["weight", "scales", "biases", "bias", TENSOR_SCALE]
        if self.quantizer is not None:
            parts += [part for part in self.quantizer.parts if part not in parts]
        names = [f"{module}.{part}" for part in parts]
        return [name for name in names if name in self] or names[:1]

    def shapes(self, module: str) -> dict[str, tuple[int, ...]]:
        """Of the parts of a layer that the quantizer packed, by its names for them."""
        assert self.quantizer is not None
        found = {name.rpartition(".")[2]: self.shape(name) for name in self.parts(module)}
        return {self.quantizer.weight: found["weight"], **found}

    def is_packed(self, module: str) -> bool:
        """Whether the checkpoint's quantizer packed this layer."""
        quantizer = self.quantizer
        return quantizer is not None and f"{module}.{quantizer.scales}" in self
