"""A checkpoint's tensors by the names they would have in a llama."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from exo.models.checkpoint import Checkpoint, Tensor

_OTHER_SENSES = re.compile(
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\."
)
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|^(language_model\.)?(model\.)?mtp\.")
"""What is computed otherwise, and what guesses several tokens at once."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WRAPPED = "model.language_model."


class CanonicalCheckpoint:
    """`renames`: parts of dotted paths, and what to read instead. `unread_layers` are as if they
    were not there."""

    def __init__(
        self, checkpoint: Checkpoint, renames: Mapping[str, str], unread_layers: range
    ) -> None:
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
        return dotted[1:-1]

    def __contains__(self, name: str) -> bool:
        return name in self._own

    @cached_property
    def is_raw(self) -> bool:
        """Whether it is as it was trained: mlx-lm turns the axes of its convolutions."""
        convolutions = (name for name in self._own if name.endswith("conv1d.weight"))
        return any(self.shape(name)[-1] != 1 for name in convolutions)

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

    def read_ahead(self, name: str) -> None:
        self._checkpoint.read_ahead(self.own_name(name))

    def give_back(self, name: str) -> None:
        self._checkpoint.give_back(self.own_name(name))

    def parts(self, module: str) -> list[str]:
        """The tensors that a linear layer or an embedding consists of."""
        names = [f"{module}.{part}" for part in ("weight", "scales", "biases", "bias")]
        return [name for name in names if name in self] or names[:1]
