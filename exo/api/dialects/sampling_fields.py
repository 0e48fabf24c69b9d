"""How clients say how to sample and when to end: the fields that dialects share."""

from __future__ import annotations

import secrets
from typing import Annotated

from msgspec import Meta

from exo.api.http.bodies import Body
from exo.api.request import ChatDefaults
from exo.errors import InvalidRequest
from exo.inference.sampling import MAX_TOP_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 16

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Limit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Of tokens; -1, as LM Studio's and llama.cpp's clients write it: as many as fit."""

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=0.01, le=10)]
Seed = int
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
StopTexts = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's own generation_config.json may say too."""


class SamplingFields(Body, kw_only=True):
    """OpenAI's, with those that vLLM, llama.cpp and SGLang added."""

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None  # llama.cpp's name for it
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stop: StopTexts | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    """False: every token is computed, none taken over or guessed; the answer is the same."""
    skip_special_tokens: bool | None = None

    @property
    def asked(self) -> frozenset[str]:
        given = self.given | ({"repetition_penalty"} if self.repeat_penalty else set())
        return given & frozenset(SAMPLING)

    @property
    def stops(self) -> tuple[str, ...]:
        return stop_texts(self.stop)

    def params(self, defaults: ChatDefaults, top_logprobs: int | None) -> SamplingParams:
        """`top_logprobs` None: the tokens' logarithms are not asked for."""
        return sampling_params(
            defaults,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty or self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias or {}),
            seed=self.seed,
            min_tokens=self.min_tokens,
            logprobs=top_logprobs is not None,
            top_logprobs=top_logprobs,
        )


def sampling_params(
    defaults: ChatDefaults,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    **more: object,
) -> SamplingParams:
    """With what is None left as it is, and a seed of its own where there is none."""
    return SamplingParams(
        temperature=(defaults.temperature or 0.0) if temperature is None else temperature,
        top_k=max(0, top_k or 0),  # vLLM and others write "off" as -1
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        **{name: value for name, value in more.items() if value is not None},  # type: ignore[arg-type]
    )


def token_limit(default: int | None, **given: int | None) -> int | None:
    """The first limit that is given, else the default; None: up to the end of the context.

    Raises:
        InvalidRequest: it is 0.
    """
    name, limit = next(((n, v) for n, v in given.items() if v is not None), ("", default))
    if limit == 0:
        raise InvalidRequest(f"{name}: expected int >= 1, or -1 for as many as fit", param=name)
    return None if limit == -1 else limit


def stop_texts(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _biases(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not token.isdecimal():
            raise InvalidRequest(
                f"logit_bias names token {token!r}; expected token ids", param="logit_bias"
            )
    return {int(token): bias for token, bias in given.items()}
