"""Shards of a tiny model, each on a cpu engine of its own, and steps through all of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zoo

from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.sampling import SamplingParams
from exo.shard import Shard

TOKENS: list[int] = np.random.default_rng(3).integers(0, 90, 300).tolist()
"""That every sequence begins with: more than pages, windows and what indexers choose."""

Logits = npt.NDArray[np.float32]


class NativeRing:
    """The model in `folder`, cut at `cuts`."""

    def __init__(self, folder: Path, *cuts: int, precise: bool = True, kv_bits: int = 16) -> None:
        self.parts: list[tuple[CPUEngine, Shard]] = []
        for start, end in pairwise([0, *cuts, zoo.LAYERS]):
            engine, shard = CPUEngine(2, precise=precise), Shard("m", start, end, zoo.LAYERS)
            engine.kv_bits = kv_bits
            engine.load_shard(shard, folder, lambda done, total: None)
            self.parts.append((engine, shard))

    def step(self, *slices: Slice) -> Logits:
        """Of all tokens of the slices, which are `TOKENS` at their places."""
        tokens = [token for part in slices for token in TOKENS[part.start : part.end]]
        batch, states = ForwardBatch(slices, np.array(tokens, np.int32)), None
        for engine, shard in self.parts:
            states = engine.compute(shard, batch, states)
        assert states is not None
        return states

    def whole(self, sequence: str = "whole") -> Logits:
        return self.step(part(sequence, 0, len(TOKENS)))

    def take_over(self, sequence: str, source: str, tokens: int) -> None:
        for engine, shard in self.parts:
            engine.take_over(shard, Slice(sequence, tokens, 1, takes_over=source))

    def check_pieces(self) -> None:
        """A token is the same in pieces and in company, decoded or prefilled."""
        expected = self.whole()
        at = 0
        for length in (1, 1, 40, 1, 90, 3, 64, 1, 1, 98):
            beside = part(f"beside {at}", 0, 5 + at % 60)
            found = self.step(part("pieces", at, length), beside)[:length]
            assert (found == expected[at : at + length]).all()
            at += length
        assert at == len(TOKENS)


def part(sequence: str, start: int, length: int, keeps: bool = False) -> Slice:
    return Slice(sequence, start, length, SamplingParams(), drafts=length - 1, keeps=keeps)
