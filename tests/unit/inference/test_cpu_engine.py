"""The cpu engine around its kernels: memory, threads, what it leaves to MLX, what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import zoo

from exo.errors import InvalidRequest, ModelUnsupported, Overloaded
from exo.inference import choose
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.benchmark import DECODED_TOKENS, EngineBenchmark, Plan, random_tokens
from exo.inference.cpu import _native as native
from exo.inference.cpu import available
from exo.inference.cpu import engine as module
from exo.inference.cpu.cores import _quota, usable_cores
from exo.inference.cpu.engine import CPUEngine
from exo.inference.cpu.shard_model import CheckpointModel
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SamplingParams
from exo.shard import Shard

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    zoo.write_checkpoint("llama", folder)
    return folder


async def greedy(engine, folder: Path, count: int = 6) -> list[int]:  # type: ignore[no-untyped-def]
    description = await engine.describe("m", folder)
    shard = Shard("m", 0, description.n_layers, description.n_layers)
    await engine.load(shard, folder, lambda done, total: None)
    tokens, found = np.array([5, 9, 2, 77], np.int32), []
    start = 0
    for _ in range(count):
        batch = ForwardBatch((Slice("s", start, len(tokens), GREEDY),), tokens)
        found.append((await engine.forward(shard, batch, None)).tokens[0].token_id)
        start += len(tokens)
        tokens = np.array(found[-1:], np.int32)
    return found


async def test_a_family_it_does_not_have_runs_on_mlx_with_one_line_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zoo.write_checkpoint("gptj", tmp_path)
    with caplog.at_level("WARNING", "exo"):
        engine = CPUEngine(2)
        found = await greedy(engine, tmp_path)
    lines = [r.message for r in caplog.records if r.name == module.__name__]
    assert lines == ["m runs on the MLX engine, slower: the cpu engine has no family 'gptj'"]
    assert engine.sequence_count == 0
    await engine.release(["s"])
    await engine.unload(Shard("m", 0, zoo.LAYERS, zoo.LAYERS))
    await engine.close()
    reference = MLXEngine(precise=True)
    assert await greedy(reference, tmp_path) == found
    await reference.close()


@pytest.mark.parametrize("family", ["starcoder2", "cohere", "deepseek_v2"])
@pytest.mark.parametrize("bits", [4, 8])
async def test_what_mlx_runs_for_it_has_its_quantized_linears_on_our_kernels(
    family: str, bits: int, tmp_path: Path
) -> None:
    zoo.write_checkpoint(family, tmp_path / "dense")
    zoo.quantize_checkpoint(tmp_path / "dense", tmp_path / "q", bits)
    logits = []
    for packed in (False, True):
        engine = MLXEngine(packed_linears=packed)
        description = await engine.describe("m", tmp_path / "q")
        shard = Shard("m", 0, description.n_layers, description.n_layers)
        await engine.load(shard, tmp_path / "q", lambda done, total: None)
        ids = np.arange(3, 20, dtype=np.int32)
        batch = ForwardBatch((Slice("s", 0, len(ids), GREEDY),), ids)
        model = engine._loaded["m"].model
        linears = [
            module
            for layer in model.layers
            for module in layer.modules()
            if isinstance(vars(module).get("_exo_weight"), native.Matrix)
        ]
        assert bool(linears) == packed
        logits.append(
            await engine._thread.submit(lambda e=engine, s=shard, b=batch: e.compute(s, b, None))
        )
        await engine.close()
    plain, ours = logits
    assert np.sqrt(np.mean((ours - plain) ** 2) / np.mean(plain**2)) < 0.05


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantization": {"group_size": 16, "bits": 4}}, "groups of 16"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "nvfp4"}}, "nvfp4"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "scales is of type"),
        ({"rope_scaling": {"type": "magic", "factor": 2.0}}, "rope scaling 'magic'"),
        ({"num_key_value_heads": 3}, "4 heads over 3 KV heads"),
        ({"num_hidden_layers": 7}, "no tensor model.layers.6"),
        ({"num_hidden_layers": 5}, "does not know the tensor model.layers.5"),
        ({"rms_norm_eps": None}, "TypeError"),
        ({"model_type": "qwen3"}, "no tensor model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_what_it_cannot_run_it_says_by_name(
    change: dict, says: str, tiny: Path, tmp_path: Path
) -> None:
    source = tiny
    if "quantization" in change:
        source = tmp_path / "q"
        zoo.quantize_checkpoint(tiny, source)
    folder = tmp_path / "changed"
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=says):
        CheckpointModel(folder)


def test_a_file_that_was_cut_short_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    whole = (tiny / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelUnsupported, match="does not fit the file; fetch the file again"):
        CheckpointModel(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
    ],
)
@pytest.mark.parametrize("times", [0.5, 2])
async def test_tensors_of_other_sizes_are_refused_before_they_are_read(
    tiny: Path, tmp_path: Path, name: str, times: float
) -> None:
    """The kernels go by the configuration: past the end of a tensor is other memory."""
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    tensors = dict(mx.load(str(tiny / "model.safetensors")).items())
    whole = tensors[name]
    half = whole[..., : whole.shape[-1] // 2]
    tensors[name] = half if times < 1 else mx.concatenate([whole, whole], axis=-1)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    engine = CPUEngine()
    description = await engine.describe("m", tmp_path)
    shard = Shard("m", 0, description.n_layers, description.n_layers)
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        await engine.load(shard, tmp_path, lambda done, total: None)
    await engine.close()


async def test_a_full_kv_cache_is_refused_and_others_go_on(
    tiny: Path,
) -> None:
    engine = CPUEngine(1)
    engine.kv_memory = 0
    with pytest.raises(Overloaded, match="the KV cache may take 0 MiB"):
        await greedy(engine, tiny)
    await engine.close()


def test_the_kv_cache_is_as_large_as_what_is_in_it(tiny: Path) -> None:
    checkpoint = CheckpointModel(tiny)
    arch = checkpoint.architecture
    model = checkpoint.build(
        0,
        arch.n_layers,
        lambda done, total: None,
        precise=False,
        cache_limit=lambda: 1 << 30,
    )
    page = 64 * arch.n_layers * arch.kv_heads * arch.head_dim * 2 * 4
    ids = np.zeros(65, np.int32)
    model.forward([native.Slice("s", 0, 64, True)], ids[:64], None)
    assert model.cache_bytes == page
    model.forward([native.Slice("s", 64, 1, True)], ids[:1], None)
    assert model.cache_bytes == 2 * page
    model.forward([native.Slice("s", 3, 1, True)], ids[:1], None)
    assert model.cache_bytes == page, "what was cut back is free"
    model.release("s")
    assert (model.cache_bytes, model.sequences) == (0, 0)


def test_keys_and_values_of_eight_bits_take_half_and_change_little(tiny: Path) -> None:
    checkpoint = CheckpointModel(tiny)
    arch = checkpoint.architecture
    ids = np.random.default_rng(0).integers(0, zoo.VOCABULARY, 200).astype(np.int32)
    bytes_of, logits = {}, {}
    for bits in (16, 8):
        model = checkpoint.build(
            0,
            arch.n_layers,
            lambda done, total: None,
            precise=False,
            kv_bits=bits,
            cache_limit=lambda: 1 << 30,
        )
        logits[bits] = model.forward([native.Slice("s", 0, 200, True)], ids, None)[0]
        bytes_of[bits] = model.cache_bytes
    groups = -(-arch.head_dim // 64)
    page = 64 * arch.n_layers * arch.kv_heads * (arch.head_dim + 4 * groups) * 2
    assert bytes_of[8] == 4 * page
    off = np.linalg.norm(logits[8] - logits[16]) / np.linalg.norm(logits[16])
    assert 0 < off < 0.01, off


def test_a_token_outside_the_vocabulary_is_refused(tiny: Path) -> None:
    checkpoint = CheckpointModel(tiny)
    model = checkpoint.build(
        0, zoo.LAYERS, lambda done, total: None, precise=False, cache_limit=lambda: 1 << 30
    )
    with pytest.raises(IndexError, match=f"token 999 of a vocabulary of {zoo.VOCABULARY}"):
        model.forward([native.Slice("s", 0, 1, True)], np.array([999], np.int32), None)


def test_threads_respect_affinity_and_quota(tmp_path: Path) -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        code = (
            "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
            "from exo.inference.cpu.cores import usable_cores; print(usable_cores())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "1"
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert _quota(tmp_path) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _quota(tmp_path) is None


def test_an_idle_engine_uses_no_processor() -> None:
    code = (
        "import time; from exo.inference.cpu import _native as n; import numpy as np;"
        "n.set_threads(2); n.read_all(np.ones(1 << 26, np.uint8));"
        "time.sleep(0.1); before = time.process_time(); time.sleep(1);"
        "print(time.process_time() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.01


def test_without_kernels_auto_is_mlx_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "why_not", lambda: available.MISSING)
    monkeypatch.setattr(choose, "_has_gpu", lambda: False)
    engine = choose.make_engine("auto")
    assert engine.name == "mlx"
    assert "Install a C++ compiler" in caplog.text and "20 to 50 times" in caplog.text
    with pytest.raises(InvalidRequest, match="--inference-engine cpu: exo's own CPU kernels"):
        choose.make_engine("cpu")


def test_auto_is_the_cpu_engine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_has_gpu", lambda: False)
    assert choose.make_engine("auto", 1).name == "cpu"
    monkeypatch.setattr(choose, "_has_gpu", lambda: True)
    assert choose.make_engine("auto").name == "mlx"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("EXO_CPU_ISA", "sse9", "one of"), ("EXO_CPU_VENDOR", "cyrix", "amd or intel")],
)
def test_forced_kernels_that_there_are_not_are_one_clear_line(
    variable: str, value: str, expected: str
) -> None:
    code = "from exo.inference.cpu.available import why_not; print(why_not())"
    environment = os.environ | {variable: value}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert f"{variable}={value} is unknown; expected {expected}" in done.stdout


async def test_the_benchmark_measures_what_it_is_asked_to(tiny: Path) -> None:
    engine = CPUEngine(1)
    benchmark, loaded = await EngineBenchmark.load(engine, "m", tiny, 1)
    assert loaded["checkpoint_bytes"] > 0
    plan = Plan((8, 300), (4,), (1, 3), 2)
    found = [measured async for measured in benchmark.run(plan)]
    assert [(m.test, m.n_tokens, m.context, m.batch) for m in found] == [
        ("prefill", 8, 0, 1),
        ("prefill", 300, 0, 1),
        ("decode", DECODED_TOKENS, 4, 1),
        ("decode", DECODED_TOKENS, 4, 3),
    ]
    assert all(0 < m.min <= m.tok_s <= m.max for m in found)
    assert engine.sequence_count == 0
    await engine.close()


def test_the_benchmarks_sequences_are_unlike_each_other() -> None:
    """A mixture's router would choose the same few experts for all of them."""
    one, other = (random_tokens(512, 50_000, number) for number in range(2))
    assert len({*one, *other}) > 900 and not np.array_equal(one, other)
    assert np.array_equal(one, random_tokens(512, 50_000, 0))
    assert random_tokens(1000, 100, 0).max() < 100


def test_a_loaded_shard_takes_little_more_than_its_checkpoint(tmp_path: Path) -> None:
    """In a process of its own, on a model large enough to be seen beside the interpreter."""
    config = {
        **zoo.tiny_config("llama"),
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "vocab_size": 32000,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    zoo.write_checkpoint("llama", tmp_path / "dense", config)
    zoo.quantize_checkpoint(tmp_path / "dense", tmp_path / "q", 8)
    code = """
import sys, psutil
from pathlib import Path
from exo.inference.cpu import _native as native
from exo.inference.cpu.shard_model import CheckpointModel
native.set_threads(2)
folder = Path(sys.argv[1])
checkpoint = CheckpointModel(folder)
before = psutil.Process().memory_info().rss
n = checkpoint.architecture.n_layers
limit = lambda: 1 << 30
model = checkpoint.build(0, n, lambda a, b: None, precise=False, cache_limit=limit)
print(psutil.Process().memory_info().rss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "q")],
        capture_output=True,
        text=True,
        check=True,
    )
    size = (tmp_path / "q" / "model.safetensors").stat().st_size
    assert size > 30_000_000
    assert int(done.stdout) <= 1.15 * size + 2_000_000, "a few pages for the process itself"
