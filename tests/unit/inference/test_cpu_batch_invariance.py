"""A token's logits are the same bits whatever shared its step and however its prompt was cut."""

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zoo

from exo.inference.cpu import _native as native
from exo.inference.cpu.shard_model import CheckpointModel

LENGTHS = (300, 70, 5, 1, 130)
DECODED = 6
KINDS = {
    "llama": {"max_position_embeddings": 512},
    "gemma2": {"head_dim": 16},
    "gpt_oss": {},
    "qwen3_moe": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, changes in KINDS.items():
        source, made[kind] = (tmp_path_factory.mktemp(f"{kind}{i}") for i in range(2))
        zoo.write_checkpoint(kind, source, {**zoo.tiny_config(kind), **changes})
        zoo.quantize_checkpoint(source, made[kind])
    return made


def model_of(folder: Path, precise: bool, kv_bits: int = 16) -> native.Model:
    checkpoint = CheckpointModel(folder)
    return checkpoint.build(
        0,
        checkpoint.architecture.n_layers,
        lambda done, total: None,
        precise=precise,
        kv_bits=kv_bits,
        cache_limit=lambda: 1 << 30,
    )


def run(
    model: native.Model,
    prompts: list[npt.NDArray[np.int32]],
    plan: list[list[tuple[int, int, int]]],
) -> dict[tuple[int, int], npt.NDArray[np.float32]]:
    """Runs steps of (sequence, start, end); the logits after the last token of each slice."""
    found = {}
    for step in plan:
        slices = [native.Slice(f"s{i}", start, end - start, True) for i, start, end in step]
        tokens = np.concatenate([prompts[i][start:end] for i, start, end in step])
        for (i, _, end), row in zip(step, model.forward(slices, tokens, None), strict=True):
            found[i, end] = row
    for i in range(len(prompts)):
        model.release(f"s{i}")
    return found


def mixed(rng: random.Random) -> list[list[tuple[int, int, int]]]:
    """A random schedule: some sequences in each step, each prefilled in random pieces, then
    decoded a token or a few at a time, sometimes cut back and done again."""
    at = [0] * len(LENGTHS)
    plan = []
    while any(at[i] < LENGTHS[i] + DECODED for i in range(len(LENGTHS))):
        step = []
        for i in rng.sample(range(len(LENGTHS)), rng.randint(1, len(LENGTHS))):
            whole = LENGTHS[i] + DECODED
            if at[i] == whole:
                continue
            if at[i] > 3 and rng.random() < 0.1:
                at[i] -= rng.randint(1, 3)
            most = rng.choice([1, 2, 7, 64, 300]) if at[i] < LENGTHS[i] else rng.choice([1, 1, 2])
            end = min(whole, at[i] + most)
            step.append((i, at[i], end))
            at[i] = end
        if step:
            plan.append(step)
    return plan


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_bits_in_every_schedule(
    kind: str, isa: str, folders: dict[str, Path]
) -> None:
    native.choose_isa(isa)
    try:
        for precise, kv_bits in ((False, 16), (True, 16), (False, 8)):
            model = model_of(folders[kind], precise, kv_bits)
            rng = np.random.default_rng(0)
            prompts = [
                rng.integers(0, zoo.VOCABULARY, n + DECODED).astype(np.int32) for n in LENGTHS
            ]
            native.set_threads(1)
            alone = run(
                model,
                prompts,
                [[(i, at, at + 1)] for i, n in enumerate(LENGTHS) for at in range(n + DECODED)],
            )
            for seed in range(3):
                native.set_threads(1 + seed % 2)
                for place, logits in run(model, prompts, mixed(random.Random(seed))).items():
                    assert np.array_equal(logits, alone[place]), (place, seed)
    finally:
        native.choose_isa("")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_bits_on_every_instruction_set(
    kind: str, folders: dict[str, Path]
) -> None:
    tokens = np.random.default_rng(0).integers(0, zoo.VOCABULARY, 310).astype(np.int32)
    schedule = [[(0, 0, 300)], *([(0, at, at + 1)] for at in range(300, 310))]
    try:
        for precise, kv_bits in ((False, 16), (True, 16), (False, 8)):
            model = model_of(folders[kind], precise, kv_bits)
            native.choose_isa("portable")
            portable = run(model, [tokens], schedule)
            for isa in native.isas():
                native.choose_isa(isa)
                for place, logits in run(model, [tokens], schedule).items():
                    assert np.array_equal(logits, portable[place]), (isa, place)
    finally:
        native.choose_isa("")


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_over_has_the_same_bits(
    kind: str, kv_bits: int, folders: dict[str, Path]
) -> None:
    model = model_of(folders[kind], False, kv_bits)
    rng = np.random.default_rng(0)
    source, other = (rng.integers(0, zoo.VOCABULARY, 306).astype(np.int32) for _ in range(2))
    for shared in (1, 63, 64, 65, 200, 299):
        mixed_up = np.concatenate([source[:shared], other[shared:]])
        whole = [[(0, 0, 300), (1, 0, 302)], [(0, 300, 301)], [(1, 302, 303)]]
        alone = run(model, [source, mixed_up], whole)
        model.forward([native.Slice("a", 0, 300, 1)], source[:300], None)
        model.take_over("b", "a", shared)
        # Both write to the page they share.
        tokens = np.concatenate([source[300:301], mixed_up[shared:302]])
        slices = [native.Slice("a", 300, 1, 1), native.Slice("b", shared, 302 - shared, 2)]
        found = model.forward(slices, tokens, None)
        assert np.array_equal(found[0], alone[0, 301])
        assert np.array_equal(found[2], alone[1, 302])
        model.release("a")
        found = model.forward([native.Slice("b", 302, 1, 1)], mixed_up[302:303], None)
        assert np.array_equal(found[0], alone[1, 303])
        model.release("b")
        assert model.cache_bytes == 0
