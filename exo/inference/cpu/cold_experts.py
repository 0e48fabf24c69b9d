"""Mixtures larger than memory: experts that are read when a token asks for them."""

from __future__ import annotations

from collections.abc import Iterable

from exo.inference.cpu import _native as native
from exo.inference.cpu.layers.experts import ExpertReader


class ColdExperts:
    """Of all layers of a checkpoint. Those used last stay in memory, as many as their share of all
    bytes holds."""

    def __init__(self) -> None:
        # The native object keeps the dictionary, not this one, which keeps it: a circle through
        # native code is never collected.
        self._readers: dict[int, ExpertReader] = {}
        readers = self._readers

        def pack(layer: int, numbers: list[int]) -> list[native.Expert]:
            for number in numbers:
                readers[layer].read_ahead(number)
            return [readers[layer].pack(number) for number in numbers]

        self.memory = native.ExpertMemory(0, pack)
        self._sizes: dict[int, int] = {}
        self._share = 1.0

    def add(self, number: int, layer: native.Layer, reader: ExpertReader, size: int) -> None:
        """A layer, with the bytes of all its experts."""
        self._readers[number], self._sizes[number] = reader, size
        layer.experts = [reader.pack(0)]
        layer.expert_memory, layer.number = self.memory, number

    def set_share(self, share: float) -> None:
        self._share = share
        self.memory.set_limit(self._limit)

    @property
    def _limit(self) -> int:
        return int(self._share * sum(self._sizes.values()))

    @property
    def to_come(self) -> int:
        """Bytes that are not in memory yet and may come."""
        return max(0, self._limit - self.memory.bytes)

    def keep_only(self, layers: Iterable[int]) -> None:
        kept = set(layers)
        for layer in self._readers.keys() - kept:
            del self._readers[layer], self._sizes[layer]
        self.memory.keep_only(sorted(kept))
        self.set_share(self._share)
