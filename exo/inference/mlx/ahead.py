"""Which token will be sampled, told on the GPU: so that the step after this one can begin at once.

A GPU has nothing to do while Python builds a step's graph, logits travel to the host and a token is
sampled there. What is drawn depends on (seed, position) alone, so the GPU can draw by the same
rule. It does so in float32, which next to never comes out otherwise; the host's draw counts.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from exo.inference.batch import Slice
from exo.inference.sampling import LEAST_TEMPERATURE, SamplingParams


def is_foreseen(part: Slice) -> bool:
    """Whether the token after the slice can be told: one is asked for, and what was said before
    or a grammar does not count."""
    how = part.sampling
    return (
        how is not None
        and part.logits == 1
        and not how.changes_logits
        and (how.constraint is None or not how.constraint.grammar)
    )


def next_token(logits: mx.array, how: SamplingParams, position: int) -> mx.array:
    """The token at `position`, lazily: what `exo.inference.sampling.sample` would choose.

    logits: [vocabulary]. Returns an int32 without dimensions.
    """
    if how.temperature == 0:
        return mx.argmax(logits).astype(mx.int32)
    scores = logits.astype(mx.float32)
    order = mx.argsort(-scores)
    weights = mx.exp((scores[order] - scores[order[0]]) / max(how.temperature, LEAST_TEMPERATURE))
    cumulative = mx.cumsum(weights)
    kept = mx.array(logits.size)
    if how.top_k:
        kept = mx.minimum(kept, how.top_k)
    if how.top_p < 1:
        crossed = mx.sum(cumulative < how.top_p * cumulative[kept - 1]) + 1
        kept = mx.minimum(kept, crossed)
    if how.min_p > 0:
        kept = mx.minimum(kept, mx.sum(weights >= how.min_p))
    uniform = np.random.Generator(np.random.Philox(key=how.seed, counter=position)).random()
    before = mx.sum(cumulative <= uniform * cumulative[kept - 1])
    return order[mx.minimum(before, kept - 1)].astype(mx.int32)
