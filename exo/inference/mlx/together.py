"""Sequences that decode together: one forward pass, their caches side by side.

mlx-lm's batched caches hold sequences with their ends aligned, padded on the left up to the
longest. A model's class has to do its part: to ask the cache for its mask and for each sequence's
position. Not all do, and none says so, so it is tried on the loaded weights (`works`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from exo.inference.mlx import caches as kv

if TYPE_CHECKING:
    from exo.inference.mlx.cut_model import CutModel

logger = logging.getLogger(__name__)

WASTE, SLACK_TOKENS = 1.5, 512
"""Sequences are padded to at most so many times their tokens, and so many more each: a long chat
beside short ones would take its own length for each of them."""

TRIED_TOKENS = (2, 30)
"""Of the sequences by which it is tried. So unequal that a padding which is not masked, or a
position that is the neighbour's, makes a difference."""

TOLERANCE = {mx.float32: 1e-3}
HALF_TOLERANCE = 0.05
"""Of the difference that a sequence's history makes to its next token, how much may be lost when it
decodes in company. In half precision rounding takes a few hundredths, a missing mask most of it."""

_FAILURES = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError)

ROUNDING = 0.05
"""The same share of what comes out, where history makes less of a difference than rounding."""


class Company:
    """Sequences whose caches are side by side, in the order of `ids`."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.caches: list[Any] = []

    def add(self, sequences: dict[str, list[Any]], used: frozenset[int] | None) -> None:
        """Take in sequences with the caches each has of its own."""
        joining = kv.merged(list(sequences.values()), used)
        if self.ids:
            for mine, other in zip(self.caches, joining, strict=True):
                mine.extend(other)
        else:
            self.caches = joining
        self.ids += sequences

    def take(self, sequence_id: str) -> list[Any]:
        """A sequence's own caches again; it is in here no longer."""
        caches = kv.split(self.caches, self.ids.index(sequence_id))
        mx.eval(kv.arrays(caches))
        self.drop(sequence_id)
        return caches

    def drop(self, sequence_id: str) -> None:
        kept = [i for i, one in enumerate(self.ids) if one != sequence_id]
        self.ids = [self.ids[i] for i in kept]
        if not kept:
            self.caches = []
            return
        for cache in self.caches:
            cache.filter(mx.array(kept))


class Together:
    """The companies of one shard. `used`: see `kv.merged`."""

    def __init__(self, used: frozenset[int] | None) -> None:
        self._used = used
        self._companies: list[Company] = []

    def in_company_with(self, sequence_ids: Collection[str]) -> list[str]:
        """Who else is in the companies of these."""
        return [
            one
            for company in self.companies_of(sequence_ids)
            for one in company.ids
            if one not in sequence_ids
        ]

    def companies_of(self, sequence_ids: Collection[str]) -> list[Company]:
        return [c for c in self._companies if any(one in sequence_ids for one in c.ids)]

    def take(self, sequence_id: str) -> list[Any]:
        """A sequence's own caches again; it is in no company any more."""
        [company] = self.companies_of([sequence_id])
        caches = company.take(sequence_id)
        self._companies = [company for company in self._companies if company.ids]
        return caches

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence."""
        for company in self.companies_of([sequence_id]):
            company.drop(sequence_id)
        self._companies = [company for company in self._companies if company.ids]

    def arrange(self, lengths: dict[str, int], own: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Find company for sequences that decode now, each of `lengths` tokens, those in `own` with
        caches of their own. Returns the caches of those that stay alone."""
        running = self.companies_of(lengths)
        joining: list[dict[str, list[Any]]] = [{} for _ in running]
        for one in sorted(own, key=lengths.__getitem__):
            for company, others in zip(running, joining, strict=True):
                if fit([lengths[each] for each in (*company.ids, *others, one)]):
                    others[one] = own[one]
                    break
            else:
                running.append(Company())
                joining.append({one: own[one]})
        alone: dict[str, list[Any]] = {}
        for company, others in zip(running, joining, strict=True):
            if len(company.ids) + len(others) == 1:
                alone |= others or {company.ids[0]: company.take(company.ids[0])}
            elif others:
                company.add(others, self._used)
        self._companies += [c for c in running if c not in self._companies]
        self._companies = [company for company in self._companies if company.ids]
        return alone


def fit(lengths: Sequence[int]) -> bool:
    """Whether sequences of so many tokens may be held side by side."""
    allowed = WASTE * sum(lengths) + SLACK_TOKENS * len(lengths)
    return len(lengths) * max(lengths) <= allowed


def works(model: CutModel, start: int, end: int) -> bool:
    """Whether layers [start, end) compute for sequences together what they compute for each."""
    ends = {start - 1, end - 1} & set(range(len(model.boundaries) - 1))
    if not all(model.boundaries[i].has_batch_axis for i in ends) or not kv.can_merge(
        model.new_caches()
    ):
        return False
    try:
        off, history, size = _tried(model, start, end)
    except _FAILURES as error:  # of a class that was not written for it
        logger.info("%s decodes one sequence at a time: %r", model.model_type, error)
        return False
    tolerance = TOLERANCE.get(_dtype(model), HALF_TOLERANCE)
    if off > tolerance * max(history, ROUNDING * size):
        logger.info(
            "%s decodes one sequence at a time: in company it is %.2g off, where its history makes "
            "a difference of %.2g",
            model.model_type,
            off,
            history,
        )
        return False
    return True


def _dtype(model: CutModel) -> mx.Dtype:
    """In which it computes: that of its norms, which nobody quantizes."""
    found = [a.dtype for _, a in tree_flatten(model.layers[0].parameters()) if a.ndim == 1]
    return found[0] if found else mx.float16


def _tried(model: CutModel, start: int, end: int) -> tuple[float, float, float]:
    """How much sequences that decode together are off, how much of a difference their history
    makes, and how large what comes out is: root mean squares."""
    features = model.boundaries[start - 1].features if start else 0
    key = mx.random.key(0)

    def received(tokens: int) -> mx.array | None:
        return mx.random.normal((tokens, features), key=key) if start else None

    one = received(1)

    def begun(tokens: int) -> list[Any]:
        caches = model.new_caches()
        ids = mx.arange(1, tokens + 1, dtype=mx.int32) % 50
        result = model.forward(start, end, ids, received(tokens), caches, logits=1)
        mx.eval(result, kv.arrays(caches))
        return caches

    token = mx.array([7], mx.int32)

    def alone(caches: list[Any]) -> mx.array:
        result = model.forward(start, end, token, one, caches, logits=1)
        assert result is not None
        return result.astype(mx.float32)

    own = [begun(tokens) for tokens in TRIED_TOKENS]
    used = model.used_leaves(start, end)
    pair = Company()
    pair.add({str(i): kv.copied(caches) for i, caches in enumerate(own)}, used)
    rows = None if one is None else mx.concatenate([one] * 2)
    steps = []
    for _ in range(2):  # the second on what the first wrote
        found = model.forward_together(start, end, mx.concatenate([token] * 2), rows, pair.caches)
        want = mx.concatenate([alone(caches) for caches in own])
        steps.append((found.astype(mx.float32), want))
    lonely = mx.concatenate([alone(model.new_caches())] * 2)
    error = mx.max(mx.stack([_rms(found - want) for found, want in steps]))
    history = mx.min(mx.stack([_rms(want - lonely) for _, want in steps]))
    measured = [error, history, _rms(lonely)]
    mx.eval(measured)
    off, made, size = (float(np.array(one)) for one in measured)
    return off, made, size


def _rms(values: mx.array) -> mx.array:
    return mx.sqrt(mx.mean(mx.square(values)))
