"""What every engine promises, on the dummy engine and on MLX with a tiny model."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import zoo

from exo.errors import CacheMiss, EngineFailed, ExoError, InvalidFrame, ModelUnsupported
from exo.inference.batch import CacheRoom, ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.dummy.engine import DummyEngine, Faults
from exo.inference.engine import InferenceEngine
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import Constraint, SamplingParams
from exo.models.grammar import of_choices
from exo.shard import Shard

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    zoo.write_checkpoint("llama", path, zoo.tiny_config("llama") | {"head_dim": 64})
    return path


def in_bytes(engine: InferenceEngine) -> InferenceEngine:
    engine.kv_bits = 8
    return engine


ENGINES = {
    "dummy": lambda: DummyEngine(Faults()),
    "mlx": MLXEngine,
    "mlx, ahead": lambda: MLXEngine(looks_ahead=True),
    "cpu": CPUEngine,
    "mlx, 8 bits": lambda: in_bytes(MLXEngine(precise=True)),
    "cpu, 8 bits": lambda: in_bytes(CPUEngine()),
}


@pytest.fixture(params=ENGINES)
async def loaded(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[tuple]:
    engine: InferenceEngine = ENGINES[request.param]()
    description = await engine.describe("m", folder)
    shard = Shard("m", 0, description.n_layers, description.n_layers)
    seen: list[tuple[int, int]] = []
    await engine.load(shard, folder, lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] > 0
    yield engine, shard
    await engine.close()


def part(start: int, tokens: list[int], sequence: str = "s") -> ForwardBatch:
    ids = np.array(tokens, np.int32)
    return ForwardBatch((Slice(sequence, start, len(tokens), GREEDY),), ids)


async def tokens_of(engine: InferenceEngine, shard: Shard, *batches: ForwardBatch) -> list[int]:
    found = []
    for batch in batches:
        found += [t.token_id for t in (await engine.forward(shard, batch, None)).tokens]
    return found


async def test_the_same_prompt_gives_the_same_token_however_it_is_cut(loaded: tuple) -> None:
    engine, shard = loaded
    whole = await tokens_of(engine, shard, part(0, [5, 6, 7, 8, 9]))
    pieces = await tokens_of(engine, shard, part(0, [5, 6], "t"), part(2, [7, 8, 9], "t"))
    assert pieces[-1:] == whole


async def test_it_may_be_closed_again(loaded: tuple) -> None:
    engine, shard = loaded
    await tokens_of(engine, shard, part(0, [5, 6, 7]))
    await engine.close()
    await engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        await tokens_of(engine, shard, part(0, [5]))


async def test_a_smaller_start_truncates(loaded: tuple) -> None:
    engine, shard = loaded
    await tokens_of(engine, shard, part(0, [5, 6, 7, 8, 9]))
    again = await tokens_of(engine, shard, part(3, [1, 2]))
    assert again == await tokens_of(engine, shard, part(0, [5, 6, 7, 1, 2], "fresh"))


async def test_a_larger_start_is_a_cache_miss(loaded: tuple) -> None:
    engine, shard = loaded
    await tokens_of(engine, shard, part(0, [5, 6]))
    for batch in (part(3, [7]), part(1, [7], "unknown")):
        with pytest.raises(CacheMiss, match="the KV cache holds"):
            await engine.forward(shard, batch, None)


async def test_sequences_of_different_lengths_share_a_step(loaded: tuple) -> None:
    engine, shard = loaded
    batch = ForwardBatch(
        (Slice("a", 0, 3, GREEDY), Slice("b", 0, 1), Slice("c", 0, 5, GREEDY)),
        np.array([5, 6, 7, 1, 9, 8, 7, 6, 5], np.int32),
    )
    together = (await engine.forward(shard, batch, None)).tokens
    assert [token.sequence_id for token in together] == ["a", "c"]
    alone = await tokens_of(engine, shard, part(0, [5, 6, 7], "x"), part(0, [9, 8, 7, 6, 5], "y"))
    assert [token.token_id for token in together] == alone


async def test_released_sequences_are_forgotten(loaded: tuple) -> None:
    engine, shard = loaded
    await tokens_of(engine, shard, part(0, [5, 6]))
    assert engine.sequence_count == 1
    await engine.release(["s", "never seen"])
    assert engine.sequence_count == 0
    with pytest.raises(CacheMiss):
        await engine.forward(shard, part(2, [7]), None)


async def test_a_step_that_lies_about_its_shape_is_refused(loaded: tuple, folder: Path) -> None:
    engine, shard = loaded
    with pytest.raises(InvalidFrame, match="add up"):
        ForwardBatch((Slice("s", 0, 2),), np.array([1, 2, 3], np.int32))
    later = Shard("m", 1, shard.n_layers, shard.n_layers)
    await engine.load(later, folder, lambda done, total: None)
    for states in (None, np.zeros((2, 4), np.float32), np.zeros((1, 3), np.float32)):
        with pytest.raises((InvalidFrame, EngineFailed)):
            await engine.forward(later, part(0, [1]), states)


async def test_a_failure_drops_the_caches_of_its_step_and_the_next_step_runs() -> None:
    engine = DummyEngine(Faults(forward=2))
    shard = Shard("m", 0, 8, 8)
    expected = await tokens_of(engine, shard, part(0, [5, 6, 7]))
    with pytest.raises(EngineFailed, match="dummy fault in forward"):
        await engine.forward(shard, part(3, [8]), None)
    assert engine.sequence_count == 0
    assert await tokens_of(engine, shard, part(0, [5, 6, 7])) == expected
    await engine.close()


@pytest.mark.parametrize("make", [MLXEngine, CPUEngine])
async def test_shards_of_one_model_share_layers_and_give_them_back(make, folder: Path) -> None:  # type: ignore[no-untyped-def]
    engine: InferenceEngine = make()
    await engine.describe("m", folder)
    n = zoo.LAYERS
    first, second = Shard("m", 0, 4, n), Shard("m", 2, n, n)
    read: list[int] = []
    await engine.load(first, folder, lambda done, total: read.append(total))
    four_layers = read[-1]
    read.clear()
    await engine.load(second, folder, lambda done, total: read.append(total))
    assert 0 < read[-1] < 0.6 * four_layers, "layers 2 and 3 are there already"
    await engine.unload(first)
    read.clear()
    await engine.load(first, folder, lambda done, total: read.append(total))
    assert 0 < read[-1] < 0.6 * four_layers, "layers 0 and 1 were given back"
    await engine.close()


async def test_a_checkpoint_no_class_fits_is_refused_by_name(tmp_path: Path) -> None:
    engine = MLXEngine(precise=True)
    for config in ('{"model_type": "no_such_thing"}', '{"model_type": "olmo"}', "{"):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises((ModelUnsupported, EngineFailed)):
            await engine.describe("m", tmp_path)
    await engine.close()


def pooled(start: int, tokens: list[int], sequence: str, how: str) -> ForwardBatch:
    sampling = SamplingParams(pooling=how)  # type: ignore[arg-type]
    piece = Slice(sequence, start, len(tokens), sampling)
    other = Slice(f"{sequence}-other", 0, 2, GREEDY)
    ids = np.array([*tokens, 3, 4], np.int32)
    return ForwardBatch((piece, other), ids)


@pytest.mark.parametrize("how", ["mean", "last"])
async def test_final_states_are_pooled_beside_others_who_sample(loaded: tuple, how: str) -> None:
    engine, shard = loaded
    whole = (await engine.forward(shard, pooled(0, [5, 6, 7, 8], "s", how), None)).tokens
    first = (await engine.forward(shard, pooled(0, [5, 6, 7], "t", how), None)).tokens
    second = (await engine.forward(shard, pooled(3, [8], "t", how), None)).tokens
    vectors = [np.frombuffer(tokens[0].vector, "<f4") for tokens in (whole, first, second)]
    parts = vectors[1] + vectors[2] if how == "mean" else vectors[2]
    np.testing.assert_allclose(vectors[0], parts, rtol=0.02, atol=0.02)
    assert np.abs(vectors[0]).sum() > 0
    # Whoever else is in the step samples as alone.
    alone = await tokens_of(engine, shard, part(0, [3, 4], "alone"))
    assert whole[1].token_id == alone[0] and not whole[1].vector


async def test_engines_agree_on_final_states(folder: Path) -> None:
    found = []
    for engine in (MLXEngine(precise=True), CPUEngine()):
        description = await engine.describe("m", folder)
        shard = Shard("m", 0, description.n_layers, description.n_layers)
        await engine.load(shard, folder, lambda done, total: None)
        tokens = (await engine.forward(shard, pooled(0, [5, 6, 7, 8], "s", "mean"), None)).tokens
        found.append(np.frombuffer(tokens[0].vector, "<f4"))
        await engine.close()
    mlx, cpu = (vector / np.linalg.norm(vector) for vector in found)
    assert mlx @ cpu > 0.999


async def test_a_constraint_holds_at_the_tail(loaded: tuple) -> None:
    engine, shard = loaded
    if engine.name != "dummy":  # whose tokenizer is there without a file
        return
    yes = SamplingParams(temperature=0, constraint=Constraint(of_choices(["yes"])))
    ids = np.array([5, 6], np.int32)
    batch = ForwardBatch((Slice("s", 0, 2, yes, 2),), ids)
    (token,) = (await engine.forward(shard, batch, None)).tokens
    assert bytes([token.token_id, *token.forced]) == b"yes"


def taking_over(
    source: str, start: int, tokens: list[int], sequence: str, drafts: int = 0
) -> ForwardBatch:
    ids = np.array(tokens, np.int32)
    return ForwardBatch((Slice(sequence, start, len(tokens), GREEDY, 0, source, drafts),), ids)


PROMPT = [1 + i * 7 % 40 for i in range(150)]


@pytest.mark.parametrize("shared", [1, 63, 64, 100, 128, 149])
async def test_a_sequence_takes_over_anothers_beginning(loaded: tuple, shared: int) -> None:
    engine, shard = loaded
    other = PROMPT[:shared] + [3, 4, 5]
    alone = await tokens_of(engine, shard, part(0, PROMPT, "a"), part(150, [9], "a"))
    fresh = await tokens_of(engine, shard, part(0, other, "b"))
    await engine.release(["a", "b"])
    first = await tokens_of(engine, shard, part(0, PROMPT))
    taken = await tokens_of(engine, shard, taking_over("s", shared, [3, 4, 5], "t"))
    assert taken == fresh
    assert first + await tokens_of(engine, shard, part(150, [9])) == alone, (
        "the source is as it was"
    )
    await engine.release(["s"])
    longer = await tokens_of(engine, shard, part(0, [*other, 6], "u"))
    assert await tokens_of(engine, shard, part(shared + 3, [6], "t")) == longer


async def test_what_is_not_there_cannot_be_taken_over(loaded: tuple) -> None:
    engine, shard = loaded
    with pytest.raises(CacheMiss):
        await engine.forward(shard, taking_over("nobody", 5, [1], "t"), None)
    await tokens_of(engine, shard, part(0, [5, 6]))
    with pytest.raises(CacheMiss):
        await engine.forward(shard, taking_over("s", 5, [1], "t"), None)


async def test_drafts_count_as_long_as_they_are_right(loaded: tuple) -> None:
    engine, shard = loaded
    tokens = await tokens_of(engine, shard, part(0, PROMPT, "a"))
    for at in range(4):
        tokens += await tokens_of(engine, shard, part(150 + at, tokens[-1:], "a"))
    for right in range(4):
        name = f"s{right}"
        drafts = tokens[1 : 1 + right] + [(t + 1) % 40 for t in tokens[1 + right : 4]]
        await tokens_of(engine, shard, part(0, PROMPT, name))
        step = taking_over("", 150, [tokens[0], *drafts], name, drafts=len(drafts))
        assert await tokens_of(engine, shard, step) == tokens[1 : 2 + right]
        if right < 2:  # what was guessed wrong is cut back
            again = part(151 + right, [tokens[1 + right]], name)
            assert await tokens_of(engine, shard, again) == [tokens[2 + right]]


async def test_an_engine_tells_how_much_room_its_cache_has(loaded: tuple) -> None:
    engine, shard = loaded
    rooms: list[CacheRoom | ExoError] = []
    engine.begin_room(shard, rooms.append)
    await tokens_of(engine, shard, part(0, PROMPT))
    engine.begin_room(shard, rooms.append)
    await engine.release(["s"])
    empty, used = rooms
    assert isinstance(empty, CacheRoom) and isinstance(used, CacheRoom)
    assert (empty.used, used.used) == (0, 3)
    assert used.pages == empty.pages > 3


async def test_what_moves_is_where_it_went(loaded: tuple) -> None:
    engine, shard = loaded
    fresh = await tokens_of(engine, shard, part(0, [*PROMPT, 3, 4], "a"))
    await engine.release(["a"])
    await tokens_of(engine, shard, part(0, PROMPT))
    moved = Slice("t", len(PROMPT), 2, GREEDY, 0, "s", moves=True)
    step = ForwardBatch((moved,), np.array([3, 4], np.int32))
    assert await tokens_of(engine, shard, step) == fresh
    await engine.release(["s"])
    longer = await tokens_of(engine, shard, part(0, [*PROMPT, 3, 4, 5], "u"))
    assert await tokens_of(engine, shard, part(len(PROMPT) + 2, [5], "t")) == longer


async def pages(make: type[MLXEngine] | type[CPUEngine], kv_bits: int, folder: Path) -> int:
    """That 10 MB hold."""
    engine = make()
    engine.kv_memory, engine.kv_bits = 10_000_000, kv_bits
    description = await engine.describe("m", folder)
    shard = Shard("m", 0, description.n_layers, description.n_layers)
    await engine.load(shard, folder, lambda done, total: None)
    await tokens_of(engine, shard, part(0, [5, 6, 7]))
    room = await engine._thread.submit(lambda: engine.cache_room(shard))
    await engine.close()
    return room.pages


@pytest.mark.parametrize("make", [MLXEngine, CPUEngine])
async def test_bytes_hold_nearly_twice_as_much(
    make: type[MLXEngine] | type[CPUEngine], folder: Path, tmp_path: Path
) -> None:
    """Here four times: both keep float32 of this model, as its weights are."""
    assert 3.5 < await pages(make, 8, folder) / await pages(make, 16, folder) < 4


@pytest.mark.parametrize("make", [MLXEngine, CPUEngine])
async def test_a_cache_of_bytes_is_planned_with_less(
    make: type[MLXEngine] | type[CPUEngine], folder: Path
) -> None:
    usual, in_fewer = make(), in_bytes(make())
    wide, narrow = await usual.describe("m", folder), await in_fewer.describe("m", folder)
    assert narrow.kv_bytes == int(wide.kv_bytes * 8.5 / 16)
    saved = wide.kv_bytes - narrow.kv_bytes
    assert [a - b for a, b in zip(wide.layer_bytes, narrow.layer_bytes, strict=True)] == [
        saved
    ] * wide.n_layers
    assert narrow.checkpoint == wide.checkpoint
    await usual.close()
    await in_fewer.close()


async def test_where_mlx_cannot_compute_with_bytes_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads of 16 values."""
    zoo.write_checkpoint("llama", tmp_path)
    assert await pages(MLXEngine, 8, tmp_path) == await pages(MLXEngine, 16, tmp_path)
    assert "m keeps 16 bits in its KV cache: " in caplog.text
