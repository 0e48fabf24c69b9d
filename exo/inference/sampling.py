"""From logits to a token: the same for every engine, deterministic per (seed, position)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from exo.errors import EngineFailed, InvalidRequest

MAX_TOP_LOGPROBS = 20

Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A token's id or place, or a count of tokens; checked where it comes from a peer."""


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What an answer is held to: from its beginning a `grammar` (see models/grammar.py; "" is
    none), or where the model thinks first, after its thoughts.

    It `thinks` from the beginning, or once its first tokens are `opening` (if there are any), until
    the tokens `closing` have come, which are written for it after `budget` (-1: no limit) tokens,
    with `following` after them.
    """

    grammar: str = ""
    thinks: bool = False
    opening: tuple[Index, ...] = ()
    closing: tuple[Index, ...] = ()
    budget: int = -1
    following: tuple[Index, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence chooses its tokens. Neutral values leave the model's distribution as it is.

    Raises:
        InvalidRequest: a value out of range; `param` names it.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    min_tokens: int = 0
    """So many are generated before one of `ends` may be."""
    ends: tuple[Index, ...] = ()
    constraint: Constraint | None = None
    pooling: Literal["", "mean", "last"] = ""
    """Asks for no token but for the prompt's final hidden states, their mean or the last."""

    @property
    def changes_logits(self) -> bool:
        """Something of what was said before, or of single tokens, counts."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the likeliest token is asked for."""
        return self.temperature == 0 and not self.logprobs and not self.changes_logits

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0, 2),
            ("top_p", 0, 1),
            ("top_k", 0, 2**31),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("repetition_penalty", 0.01, 10),
            ("seed", 0, 2**64 - 1),
            ("top_logprobs", 0, MAX_TOP_LOGPROBS),
            ("min_tokens", 0, 2**31),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}; expected {low} to {high}", param=name)


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A token, and where asked the natural logarithm of its probability under the raw logits.

    `forced` tokens follow it, as its constraint allows no others: nothing needs to be computed to
    know them. `refusal` says in place of a token why the constraint cannot be kept.
    """

    token_id: Index
    logprob: float = 0.0
    top: tuple[tuple[Index, float], ...] = ()
    sequence_id: str = ""
    forced: tuple[Index, ...] = ()
    refusal: str = ""
    vector: bytes = b""
    """Where pooling is asked for, in place of a token: float32 [hidden], little endian, the final
    hidden states of the step's tokens summed, or those of the last one."""

    def of_sequence(self, sequence_id: str) -> SampledToken:
        return msgspec.structs.replace(self, sequence_id=sequence_id)


def sample(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int],
    prompt_length: int,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> SampledToken:
    """Choose the token at position len(history).

    logits: float32 [vocabulary]. history: all tokens before, the prompt's `prompt_length` first.
    allowed: bool [up to vocabulary], None for all; tokens beyond its end are not.
    The repetition penalty (Keskar et al. 2019, https://arxiv.org/abs/1909.05858) looks at all of
    them; presence and frequency penalties (as in OpenAI's API) at the generated ones. Then
    temperature, top_k, top_p (Holtzman et al. 2019) and min_p (Nguyen et al. 2024), in this order.

    Raises:
        EngineFailed: the logits hold NaN or no finite value.
    """
    raw = np.asarray(logits, dtype=np.float32)
    # The first maximum, or the first NaN: one pass tells both.
    likeliest = int(raw.argmax())
    if not math.isfinite(raw.item(likeliest)):
        raise EngineFailed("the model's logits are not finite: its weights or a kernel are damaged")
    if params.is_plain_greedy and (allowed is None or _may(likeliest, allowed)):
        return SampledToken(likeliest)
    scores = raw
    if params.changes_logits:
        scores = _penalized(raw, params, history, prompt_length)
    if allowed is not None:
        scores = raw.copy() if scores is raw else scores
        known = min(len(allowed), len(scores))
        np.copyto(scores[:known], -np.inf, where=~allowed[:known])
        scores[known:] = -np.inf
    if params.temperature == 0:
        token_id = int(scores.argmax())
    else:
        token_id = _draw(scores, params, position=len(history))
    if not params.logprobs:
        return SampledToken(token_id)
    return _with_logprobs(token_id, raw, params.top_logprobs)


def _may(token_id: int, allowed: npt.NDArray[np.bool_]) -> bool:
    return token_id < len(allowed) and bool(allowed[token_id])


def _penalized(
    raw: npt.NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int],
    prompt_length: int,
) -> npt.NDArray[np.float32]:
    scores = raw.copy()
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(scores):
            scores[token_id] += bias
    if params.repetition_penalty != 1 and history:
        seen = np.unique(np.asarray(history))
        values = scores[seen]
        scores[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    generated = history[prompt_length:]
    if len(generated) < params.min_tokens:
        scores[[token_id for token_id in params.ends if token_id < len(scores)]] = -np.inf
    if (params.presence_penalty or params.frequency_penalty) and generated:
        seen, counts = np.unique(np.asarray(generated), return_counts=True)
        scores[seen] -= params.presence_penalty + params.frequency_penalty * counts.astype(
            np.float32
        )
    return scores


_CUTS = (1e-3, 1e-4, 1e-5, 1e-6, 0.0)
"""Tokens this much less likely than the likeliest are left out of sorting at first, which for all
of a vocabulary takes longer than to compute the logits of a small model."""


LEAST_TEMPERATURE = 1e-30
"""For float32; below it the likeliest token is chosen in any case."""


def _draw(scores: npt.NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """Inverse transform sampling over the tokens that survive the filters, likeliest first."""
    peak = scores.max()
    # Of all tokens in float32, 2e-6 of each at most, of those that may be drawn in float64: that of
    # a whole vocabulary took longer than the kernels of a small model.
    rough = scores - peak
    rough /= np.float32(max(params.temperature, LEAST_TEMPERATURE))
    np.exp(rough, out=rough)
    total = float(rough.sum(dtype=np.float64))
    # A counter-based generator: the draw depends on (seed, position) and on nothing before it.
    uniform = np.random.Generator(np.random.Philox(key=params.seed, counter=position)).random()
    filtered = bool(params.top_k) or params.top_p < 1 or params.min_p > 0
    needed = 0.0  # of the mass, for sorting to be of use
    if not params.top_k and not params.min_p:
        needed = total * (params.top_p if filtered else uniform)
    # Where the first does not hold top_k of them, these are found at once.
    for cut in (_CUTS[0], _CUTS[-1]) if params.top_k else _CUTS:
        if cut == 0 and params.top_k:
            order = _likeliest(scores, params.top_k)
        else:
            order = np.flatnonzero(rough >= cut)
            if cut > 0 and rough[order].sum(dtype=np.float64) < needed:
                continue
            order = order[np.argsort(-scores[order], kind="stable")]
        weights = np.exp((scores[order].astype(np.float64) - peak) / params.temperature)
        cumulative = np.cumsum(weights)
        kept = _survivors(weights, cumulative, total, params, is_all=cut == 0)
        # Where the filters keep tokens beyond the cut, the draw may still fall before it.
        reach = uniform * (total if kept is None else float(cumulative[kept - 1]))
        if kept is None and (filtered or cumulative[-1] <= reach):
            continue
        index = int(np.searchsorted(cumulative, reach, side="right"))
        return int(order[min(index, (kept or len(order)) - 1)])
    raise AssertionError("the last cut leaves nothing out")


def _survivors(
    weights: npt.NDArray[np.float64],
    cumulative: npt.NDArray[np.float64],
    total: float,
    params: SamplingParams,
    *,
    is_all: bool,
) -> int | None:
    """How many of the likeliest tokens the filters keep; None if there may be more of them than the
    `weights` at hand, likeliest first."""
    kept, known = len(weights), is_all
    if params.top_k:
        if params.top_k > kept and not is_all:
            return None
        kept, known = min(kept, params.top_k), True
        total = float(cumulative[kept - 1])
    if params.top_p < 1:
        # The token that crosses the threshold belongs to the nucleus.
        nucleus = int(np.searchsorted(cumulative[:kept], params.top_p * total)) + 1
        known = known or nucleus <= kept
        kept = min(kept, nucleus)
    if params.min_p > 0:
        likely = int(np.count_nonzero(weights[:kept] >= params.min_p * weights[0]))
        known = known or likely < kept
        kept = likely
    return kept if known else None


def _with_logprobs(token_id: int, raw: npt.NDArray[np.float32], top: int) -> SampledToken:
    # As in _draw: exponentials of a whole vocabulary in float32, each within 1e-6.
    peak = raw.max()
    exponentials = raw - peak
    np.exp(exponentials, out=exponentials)
    normalizer = float(peak) + math.log(float(exponentials.sum(dtype=np.float64)))

    def logprob(token: int) -> float:
        return float(raw[token]) - normalizer

    likeliest = tuple((int(token), logprob(token)) for token in _likeliest(raw, top))
    return SampledToken(token_id, logprob(token_id), likeliest)


def _likeliest(raw: npt.NDArray[np.float32], top: int) -> npt.NDArray[np.intp]:
    """The first `top` of a stable sort, which of a whole vocabulary takes longer than the kernels
    of a small model."""
    if top == 0:
        return np.empty(0, np.intp)
    least = np.partition(raw, -top)[-top] if top < len(raw) else -np.inf
    candidates = np.flatnonzero(raw >= least)
    return candidates[np.argsort(-raw[candidates], kind="stable")[:top]]
