"""Sequences that decode in one forward pass get what each gets alone, whoever comes and goes."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
import zoo

from exo.errors import CacheMiss
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.mlx import sequences, together
from exo.inference.mlx.cut_model import CutModel
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SamplingParams
from exo.shard import Shard

GREEDY = SamplingParams(temperature=0)

ALONE = {"gemma2", "llama4"}
"""Of those below: one's class adds a mask of truths to scores, the other's caches do not merge."""

FAMILIES = (
    *(
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mistral3",
        "mixtral",
        "phi3",
        "gemma2",
        "gemma3_text",
    ),
    *("gemma4_text", "granite", "granitemoehybrid", "olmo2", "gpt_oss", "cohere2", "deepseek_v3"),
    *("glm4_moe", "mamba2", "nemotron_h", "qwen3_next", "lfm2", "falcon_h1", "llama4", "minimax"),
)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_which_families_decode_together(model_type: str, tmp_path: Path) -> None:
    zoo.write_checkpoint(model_type, tmp_path)
    model = CutModel(tmp_path, mx.float32)
    assert together.works(model, 0, model.n_layers) == (model_type not in ALONE)


class Ring:
    """Sequences on an engine, in one shard or in two."""

    def __init__(self, engine: MLXEngine, shards: list[Shard]) -> None:
        self._engine, self._shards = engine, shards
        self.tokens: dict[str, list[int]] = {}
        self.likeliest: dict[str, int] = {}

    def step(self, parts: list[tuple[str, int, list[int]]], moves: str = "") -> npt.NDArray:
        """Each part: a sequence, where it goes on, and its next tokens. Logits, [parts, ...]."""
        slices, ids = [], []
        for name, start, tokens in parts:
            slices.append(Slice(name, start, len(tokens), GREEDY))
            ids += tokens
            self.tokens[name] = self.tokens.get(name, [])[:start] + tokens
        batch = ForwardBatch(tuple(slices), np.array(ids, np.int32))
        states = None
        for shard in self._shards:
            states = self._engine.compute(shard, batch, states)
        assert states is not None and len(states) == len(parts)
        self.likeliest |= {
            name: int(row.argmax()) for (name, *_), row in zip(parts, states, strict=True)
        }
        return states

    def take_over(self, name: str, source: str, start: int, *, moves: bool) -> None:
        self.tokens[name] = self.tokens[source][:start]
        for shard in self._shards:
            part = Slice(name, start, 1, GREEDY, takes_over=source, moves=moves)
            self._engine.take_over(shard, part)
        if moves:
            del self.tokens[source]

    def release(self, name: str) -> None:
        del self.tokens[name]
        self._engine.release_sequences([name])

    def companies(self) -> list[list[str]]:
        together = self._engine._loaded["m"].steps[self._shards[-1]].sequences._together
        return [c.ids for c in together._companies] if together else []


async def ring(folder: Path, cuts: list[int], *, looks_ahead: bool = False) -> Ring:
    engine = MLXEngine(precise=True, looks_ahead=looks_ahead)
    n = (await engine.describe("m", folder)).n_layers
    ends = [*cuts, n]
    shards = [Shard("m", a, b, n) for a, b in zip([0, *ends], ends, strict=False)]
    for shard in shards:
        await engine.load(shard, folder, lambda done, total: None)
    engine._thread.close()  # steps are run in the test's; pytest would wait for this one for 10 s
    return Ring(engine, shards)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in ("llama", "gemma3_text", "qwen3_next", "gemma2"):
        found[family] = tmp_path_factory.mktemp(family)
        zoo.write_checkpoint(family, found[family])
    return found


@pytest.mark.parametrize(
    ("cuts", "looks_ahead"), [([], False), ([2], False), ([], True)], ids=["whole", "cut", "ahead"]
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "gemma2"])
async def test_whoever_comes_and_goes(
    family: str,
    cuts: list[int],
    looks_ahead: bool,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences begin, decode in changing company, are cut back, taken over and released; a step
    that was begun before it was asked for gives what it would have given then."""
    monkeypatch.setattr(sequences, "REST_STEPS", 0)
    foreseen = []
    arrived = sequences.ShardSequences.arrived

    def watched(self: sequences.ShardSequences, part: Slice, token_id: int) -> mx.array | None:
        found = arrived(self, part, token_id)
        foreseen.append(found is not None)
        return found

    monkeypatch.setattr(sequences.ShardSequences, "arrived", watched)
    busy = await ring(folders[family], cuts, looks_ahead=looks_ahead)
    alone = await ring(folders[family], [])
    rng, names = random.Random(7), iter(range(1000))
    seen = set()

    def next_of(one: str) -> int:
        """Mostly what the engine foresees."""
        return (
            busy.likeliest[one]
            if one in busy.likeliest and rng.random() < 0.9
            else rng.randrange(1, 50)
        )

    for _ in range(60):
        live = list(busy.tokens)
        what = rng.random()
        if len(live) < 2 or (what < 0.15 and len(live) < 6):
            prompt = [rng.randrange(1, 50) for _ in range(rng.choice([1, 3, 20]))]
            busy.step([(f"s{next(names)}", 0, prompt)])
        elif what < 0.25:
            busy.release(rng.choice(live))
        elif what < 0.35:
            source = rng.choice(live)
            new, moves = f"s{next(names)}", rng.random() < 0.5
            busy.take_over(new, source, len(busy.tokens[source]), moves=moves)
        elif what < 0.4:
            one = rng.choice(live)  # goes on from earlier, where its cache lets it
            start = max(1, len(busy.tokens[one]) - 2)
            try:
                busy.step([(one, start, [rng.randrange(1, 50)])])
            except CacheMiss:
                busy.release(one)
        else:
            some = rng.sample(live, rng.randint(1, len(live)))
            parts = [(one, len(busy.tokens[one]), [next_of(one)]) for one in some]
            if rng.random() < 0.3:
                one, start, tokens = parts[0]
                parts[0] = (one, start, [*tokens, rng.randrange(1, 50)])  # a chunk beside them
            if rng.random() < 0.3:
                parts.append((f"s{next(names)}", 0, [5, 6, 7]))
            found = busy.step(parts)
            seen |= {len(ids) for ids in busy.companies()} if family != "gemma2" else {2, 3, 4}
            for (one, *_), got in zip(parts, found, strict=True):
                name = f"x{next(names)}"
                [want] = alone.step([(name, 0, busy.tokens[one])])
                alone.release(name)
                np.testing.assert_allclose(got, want, atol=2e-3 * float(np.abs(want).max()))
    assert {2, 3} <= seen, "they were hardly ever in company"
    assert (sum(foreseen) > 10) is looks_ahead, sum(foreseen)


def test_a_long_chat_is_no_company_for_short_ones() -> None:
    assert together.fit([10, 900])
    assert together.fit([4000, 4500, 5000])
    assert not together.fit([100, 100, 100, 30_000])
