"""What an engine is given and gives back: a step of a ragged batch, and the room it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from exo.errors import InvalidFrame
from exo.inference.sampling import Index, SampledToken, SamplingParams

PAGE_TOKENS = 64
"""Tokens in a page of the KV cache: what is counted of it, on every engine."""


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """`length` consecutive tokens of one sequence, the first at position `start`.

    `sampling` asks for the token that follows the last of them; None asks for nothing.
    `prompt_length` tells where the prompt ends and generated tokens begin.
    `takes_over` names a sequence whose first `start` tokens are this one's too: its KV cache is
    shared up to there, before anything is computed; with `moves` that one has ended and nobody asks
    for it again, so what it holds need not be copied.
    The last `drafts` tokens are guesses: a token is asked for before each of them as well, and they
    count as long as what is sampled is what was guessed.
    `keeps` asks members whose cache cannot be cut back to remember how it is after this slice, so
    that the sequence, or one that takes it over, can begin again from there.
    """

    sequence_id: str
    start: Index
    length: Index
    sampling: SamplingParams | None = None
    prompt_length: Index = 0
    takes_over: str = ""
    drafts: Index = 0
    moves: bool = False
    keeps: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def logits(self) -> int:
        """Of how many of its last tokens they are wanted."""
        return 0 if self.sampling is None or self.sampling.pooling else self.drafts + 1

    @property
    def pools(self) -> bool:
        return self.sampling is not None and bool(self.sampling.pooling)


class ForwardBatch(msgspec.Struct, frozen=True):
    """One ragged step: slices one after the other, no padding.

    `token_ids`: int32 [tokens], on every shard: the first embeds them, the last keeps them as the
    history that penalties look at, and some architectures read them in every layer.

    Raises:
        InvalidFrame: the slices' lengths do not add up to the tokens.
    """

    slices: tuple[Slice, ...]
    token_ids: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        total, are_possible = 0, True
        for part in self.slices:
            total += part.length
            are_possible = are_possible and part.length > part.drafts and part.start >= 0
        if total != len(self.token_ids) or not are_possible:
            raise InvalidFrame(
                f"a step of {len(self.token_ids)} tokens has slices "
                f"{[(s.start, s.length) for s in self.slices]}: "
                "expected lengths that are positive, beyond their drafts, and add up to the tokens"
            )

    def __iter__(self) -> Iterator[tuple[Slice, slice]]:
        """Each slice with its rows in `token_ids` and in the hidden states."""
        row = 0
        for part in self.slices:
            yield part, slice(row, row + part.length)
            row += part.length


class StepOutput(msgspec.Struct, frozen=True):
    """What leaves a shard: hidden states [tokens, hidden], or on the last shard sampled tokens."""

    hidden_states: npt.NDArray[Any] | None = None
    tokens: tuple[SampledToken, ...] = ()


class CacheRoom(msgspec.Struct, frozen=True, array_like=True):
    """What the KV cache of a shard may hold, in pages of PAGE_TOKENS tokens, and holds.

    `is_paged`: sequences that begin alike share pages, and what is computed does not depend on how
    a prompt is cut. Where not, each sequence takes pages of its own.
    `state_pages`: what a sequence takes beside its tokens, and again for each moment kept of it,
    where layers remember a state: from there, and from its end, it can go on, from nowhere else.
    0: from any of its tokens.
    """

    pages: Index
    used: Index
    is_paged: bool
    state_pages: Index = 0
