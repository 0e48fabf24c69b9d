"""The GPU's guess at a token is the token that the host draws."""

import mlx.core as mx
import numpy as np
import pytest

from exo.inference.batch import Slice
from exo.inference.mlx import ahead
from exo.inference.sampling import Constraint, SamplingParams, sample

VOCABULARY = 5000
DRAWS = 60


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 40},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
        {"temperature": 1, "min_p": 0.1},
        {"temperature": 1, "top_p": 0},
        {"temperature": 1e-40},
        {"temperature": 0.8, "top_k": 100_000},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_it_draws_what_the_host_draws(how: dict, dtype: mx.Dtype) -> None:
    rng, agreed = np.random.default_rng(3), 0
    for position in range(DRAWS):
        logits = mx.array(3 * rng.normal(size=VOCABULARY)).astype(dtype)
        params = SamplingParams(**how, seed=11)
        token = sample(np.array(logits.astype(mx.float32)), params, range(position), 0)
        agreed += ahead.next_token(logits, params, position).item() == token.token_id
    # Equal logits, of which bfloat16 has many, are sorted otherwise.
    assert agreed >= DRAWS * (0.5 if dtype == mx.bfloat16 else 0.95)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (SamplingParams(), True),
        (SamplingParams(logprobs=True, top_logprobs=3), True),
        (SamplingParams(constraint=Constraint(thinks=True)), True),
        (SamplingParams(constraint=Constraint(grammar='root ::= "a"')), False),
        (SamplingParams(presence_penalty=0.5), False),
        (SamplingParams(pooling="last"), False),
        (None, False),
    ],
)
def test_what_is_foreseen(how: SamplingParams | None, expected: bool) -> None:
    assert ahead.is_foreseen(Slice("s", 3, 1, how)) is expected
    assert not ahead.is_foreseen(Slice("s", 3, 2, how, drafts=1))
