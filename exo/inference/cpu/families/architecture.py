"""What a checkpoint computes, in one vocabulary for all families."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exo.errors import ModelUnsupported
from exo.inference.cpu.families.blocks import Blocks
from exo.inference.cpu.families.entries import Compressed, compressed_of
from exo.inference.cpu.families.family import Experts, Factor, Family, Growth, Mixer
from exo.inference.cpu.families.ngrams import Ngrams
from exo.inference.cpu.families.pools import Pools
from exo.inference.cpu.families.positions import Config, head_dim
from exo.inference.cpu.families.rope import RopeTable
from exo.inference.cpu.families.selective import SelectiveScan, scan_of
from exo.inference.cpu.families.streams import Hyper, hyper_of
from exo.inference.cpu.families.table import FAMILIES
from exo.models.description import text_config


@dataclass(frozen=True)
class Recurrent:
    """Sizes of the layers that remember a state: `taps` of their convolution, and a delta net's
    heads and what each of them holds. `tiled`: value head i goes with key head i modulo their
    number, not with the i-th part of them; `regroups`: but for the layer after them. `fading_bound`
    and `sigmoid_gate` are those of the native DeltaNet."""

    taps: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    tiled: bool = False
    regroups: bool = False
    sigmoid_gate: bool = False
    fading_bound: float = 0.0


@dataclass(frozen=True)
class StateSpace:
    """Of Mamba-2's layers: heads, how many groups of them share what goes in and what reads,
    how many numbers a head has and a number's state, parts of the norm (0: there is none), and
    bounds of a step."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    norm_groups: int
    least_step: float
    most_step: float


@dataclass(frozen=True)
class Latent:
    """Of attention over latents: numbers of each head that positions do not turn, numbers they do,
    of a latent, and of each head's values. `most`: to how many keys a query attends, 0 for all, in
    pools of `pool`; `choosing`: the layers that choose them, by an indexer, and the others take
    theirs over."""

    nope: int
    turned: int
    rank: int
    value_dim: int
    most: int = 0
    pool: int = 1
    index_heads: int = 0
    index_dim: int = 0
    index_interleaved: bool = False
    index_turns_last: bool = False
    index_eps: float = 1e-6
    choosing: frozenset[int] = frozenset()


@dataclass(frozen=True)
class AltUp:
    """Of a hidden state of several streams: which one layers compute with, how large coefficients
    may be, and whether what tokens bring reads it scaled."""

    streams: int
    active: int
    clip: float
    is_scaled: bool


@dataclass(frozen=True)
class Architecture:
    """`ropes`, `windows`, `mixers`, `query_growth`, `plain_norms`, `query_heads`, `head_shapes` (KV
    heads and their size) and `kv_from` (whose keys and values are read) have one entry a layer; a
    window of 0 sees everything before. `expert_layers` are those with a mixture, `sink_layers` with
    sinks. Where `value_dim` is 0, values are of the size of keys. `guessing_layers`
    come after the others and guess further tokens, as in DeepSeek V3: nothing here asks them."""

    family: Family
    n_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool | None
    raw_factors: Mapping[str, Factor]
    head_norms: bool
    layer_norm: bool
    norm_eps: float
    after_norm_eps: float
    ropes: tuple[RopeTable | None, ...]
    windows: tuple[int, ...]
    mixers: tuple[Mixer, ...]
    mlp_layers: frozenset[int]
    parallel: bool
    query_growth: tuple[Growth | None, ...]
    plain_norms: tuple[str, ...]
    query_heads: tuple[int, ...]
    head_shapes: tuple[tuple[int, int], ...]
    kv_from: tuple[int, ...]
    sink_layers: frozenset[int]
    value_dim: int
    values_are_keys: frozenset[int]
    token_input_dim: int
    guessing_layers: range = range(0)
    recurrent: Recurrent | None = None
    state_space: StateSpace | None = None
    selective_scan: SelectiveScan | None = None
    latent: Latent | None = None
    compressed: Compressed | None = None
    blocks: Blocks | None = None
    pools: Pools | None = None
    ngrams: Ngrams | None = None
    hyper: Hyper | None = None
    alt_up: AltUp | None = None
    loops: int = 1
    norms_loops: bool = True
    sparsity: tuple[float | None, ...] = ()
    limits: tuple[tuple[float, float], ...] = ()
    latent_eps: float = 1e-6
    expert_layers: frozenset[int] = frozenset()
    expert_count: int = 0
    experts_per_token: int = 0
    expert_groups: tuple[int, int, int] = (1, 1, 1)
    routing: str = "TOP_THEN_SOFTMAX"
    expert_scale: float = 1.0
    expert_band: float = 0.0
    shared_scale: float = 1.0
    attention_scale: float = 1.0
    value_scale: float = 1.0
    attention_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float = 0.0

    @property
    def ends_in_norm(self) -> bool:
        """Whether the head reads a norm, and not what mixes several hidden states."""
        return self.hyper is None or not self.hyper.rank

    @property
    def uncuttable(self) -> str:
        """Why layers may not be cut everywhere; empty where they may."""
        if self.loops > 1:
            return "it runs its layers more than once"
        if self.token_input_dim:
            return "each layer reads something of the tokens themselves"
        if any(source != layer for layer, source in enumerate(self.kv_from)):
            return "layers read keys and values of earlier ones"
        if self._taking_over:
            return "layers attend to the tokens that one before them chose"
        return ""

    @property
    def cuts(self) -> frozenset[int] | None:
        """Before which layers the model may be cut; None: before any."""
        if not self.uncuttable:
            return None
        return frozenset(self._before_choices()) if self._taking_over else frozenset()

    def _before_choices(self) -> Iterator[int]:
        """Layers of which the next one that attends chooses what to, or none attends."""
        assert self.latent is not None
        for start in range(1, self.n_layers):
            attending = next((i for i in self._attending if i >= start), None)
            if attending is None or attending in self.latent.choosing:
                yield start

    @property
    def _attending(self) -> list[int]:
        return [i for i, mixer in enumerate(self.mixers) if mixer == "attention"]

    @property
    def _taking_over(self) -> bool:
        """Whether layers attend to what another one's indexer chose."""
        choosing = self.latent.choosing if self.latent is not None else frozenset()
        return 0 < len(choosing) < len(self._attending)


def architecture(config: Config) -> Architecture:
    """Read a config.json.

    Raises:
        ModelUnsupported: no family has that model_type, or the config lacks or asks for something
            this engine does not know.
    """
    config = _unwrapped(config)
    family = FAMILIES.get(config["model_type"])
    if family is None:
        raise ModelUnsupported(f"the cpu engine has no family {config['model_type']!r}")
    try:
        return _read(family.config(text_config(dict(config))), family)
    except (KeyError, IndexError, TypeError) as error:
        raise ModelUnsupported(
            f"config.json of a {config['model_type']}: {type(error).__name__}: {error}"
        ) from error


def _unwrapped(config: Config) -> Config:
    """What is inside of a wrapper for models that also see. Ling 2.5 and 3 have one name."""
    if "BailingMoeV3ForCausalLM" in (config.get("architectures") or ()):
        return {**config, "model_type": "bailing_moe_v3"}
    if config["model_type"] not in ("mistral3", "pixtral"):
        return config
    text = config.get("text_config") or {}
    return {"model_type": "mistral", "tie_word_embeddings": False, **text}


def _read(config: Config, family: Family) -> Architecture:
    n_layers = int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    own = {**config, "head_dim": config.get("head_dim") or family.head_dim}
    if not family.explicit_head_dim:
        own["head_dim"] = None
    latent = _latent(config) if family.latent else None
    compressed = compressed_of(config) if family.compressed else None
    width = -(-(latent.rank + latent.turned) // 16) * 16 if latent else head_dim(own)
    tied = family.tied
    if family.tied_by_config:
        tied = bool(config.get("tie_word_embeddings", tied))
    mixers = tuple(family.mixer(config, i) for i in range(n_layers))
    if latent is not None:
        attending = {i for i, mixer in enumerate(mixers) if mixer == "attention"}
        latent = replace(latent, choosing=latent.choosing & attending)
    kv_heads = 1 if latent else int(config.get("num_key_value_heads") or heads)
    values: dict[str, Any] = {
        "attention_scale": width**-0.5,
        "layer_norm": family.layer_norm,
        **family.scales(config),
        **(_mixture(config, family.experts, n_layers) if family.experts else {}),
    }
    return Architecture(
        family=family,
        n_layers=n_layers,
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        tied=tied,
        raw_factors=family.raw_factors(config),
        head_norms=family.head_norms and bool(config.get("use_qk_norm", True)),
        norm_eps=float(config["rms_norm_eps"]),
        after_norm_eps=float(config[family.after_norm_eps or "rms_norm_eps"]),
        ropes=tuple(family.rope(own, i) for i in range(n_layers)),
        windows=tuple(family.window(config, i) for i in range(n_layers)),
        mixers=mixers,
        mlp_layers=frozenset(i for i in range(n_layers) if family.mlps(config, i)),
        parallel=family.parallel(config),
        query_growth=tuple(family.growth(config, i) for i in range(n_layers)),
        plain_norms=tuple(family.plain_norms(config, i) for i in range(n_layers)),
        query_heads=tuple(
            family.heads(config, i) if family.heads else heads for i in range(n_layers)
        ),
        head_shapes=tuple(family.head_shape(own, i) for i in range(n_layers))
        if family.head_shape
        else ((kv_heads, width),) * n_layers,
        kv_from=tuple(family.kv_from(config, i) for i in range(n_layers)),
        sink_layers=frozenset(i for i in range(n_layers) if family.sinks(config, i)),
        value_dim=family.value_dim(config),
        values_are_keys=frozenset(i for i in range(n_layers) if family.values_are_keys(config, i)),
        token_input_dim=int(config.get(family.token_inputs) or 0) if family.token_inputs else 0,
        guessing_layers=range(
            n_layers, n_layers + int(config.get("num_nextn_predict_layers") or 0)
        ),
        recurrent=_recurrent(config, frozenset(mixers)),
        state_space=_state_space(config) if any("state_space" in m for m in mixers) else None,
        selective_scan=scan_of(config) if "selective_scan" in mixers else None,
        latent=latent,
        compressed=compressed,
        blocks=family.blocks(config),
        pools=family.pools(config),
        ngrams=family.ngrams(config),
        hyper=hyper_of(config) if family.hyper else None,
        alt_up=_alt_up(config) if family.alt_up else None,
        loops=family.loops(config),
        norms_loops=not config.get("skip_loop_final_norm"),
        sparsity=tuple(family.sparsity(config, i) for i in range(n_layers)),
        limits=tuple(family.limits(config, i) for i in range(n_layers)),
        latent_eps=family.latent_eps or float(config["rms_norm_eps"]),
        **values,
    )


def _mixture(config: Config, experts: Experts, n_layers: int) -> dict[str, Any]:
    having = frozenset(i for i in range(n_layers) if experts.layers(config, i))
    if not config.get(experts.count) or not having:
        return {}
    return {
        "expert_layers": having,
        "expert_count": int(config[experts.count]),
        "experts_per_token": int(config[experts.top]),
        "routing": experts.normalized if experts.normalizes(config) else experts.routing,
        "expert_scale": experts.scale(config),
        "shared_scale": experts.shared_scale(config),
        "expert_groups": experts.groups(config),
        **experts.told_by_config(config),
    }


def _alt_up(config: Config) -> AltUp:
    return AltUp(
        streams=int(config["altup_num_inputs"]),
        active=int(config["altup_active_idx"]),
        clip=float(config.get("altup_coef_clip") or math.inf),
        is_scaled=bool(config["altup_correct_scale"]),
    )


def _latent(config: Config) -> Latent:
    sizes = Latent(
        nope=int(config["qk_nope_head_dim"]),
        turned=int(config["qk_rope_head_dim"]),
        rank=int(config["kv_lora_rank"]),
        value_dim=int(config["v_head_dim"]),
    )
    if "index_topk" not in config:
        return sizes
    n_layers = int(config["num_hidden_layers"])
    kinds = config.get("indexer_types") or ["full"] * n_layers
    if int(config["index_topk"]) % int(config.get("index_kpool") or 1):
        raise ModelUnsupported(f"{config['index_topk']} tokens in pools of {config['index_kpool']}")
    return replace(
        sizes,
        most=int(config["index_topk"]),
        pool=int(config.get("index_kpool") or 1),
        index_heads=int(config["index_n_heads"]),
        index_dim=int(config["index_head_dim"]),
        index_interleaved=bool(config.get("indexer_rope_interleave")),
        index_turns_last=bool(config.get("indexer_rope_last")),
        index_eps=float(config.get("indexer_norm_eps", 1e-6)),
        choosing=frozenset(i for i in range(n_layers) if kinds[i] == "full"),
    )


def _state_space(config: Config) -> StateSpace:
    least, most = config.get("time_step_limit") or (0.001, 100.0)
    sizes = StateSpace(
        heads=int(config["mamba_n_heads"]),
        groups=int(config["mamba_n_groups"]),
        head_dim=int(config["mamba_d_head"]),
        state_dim=int(config["mamba_d_state"]),
        norm_groups=int(config.get("mamba_norm_groups", 1)),
        least_step=float(least),
        most_step=min(float(most), 1e30),
    )
    if sizes.state_dim % 16 or sizes.heads % sizes.groups:
        raise ModelUnsupported(
            f"states of {sizes.state_dim} and {sizes.heads} heads in {sizes.groups} groups; the "
            "cpu engine takes states that 16 divides, and heads that their groups divide"
        )
    return sizes


def _recurrent(config: Config, mixers: frozenset[Mixer]) -> Recurrent | None:
    if "short_convolution" in mixers:
        return Recurrent(int(config["conv_L_cache"]))
    if "kimi_delta_net" in mixers:
        own = config["linear_attn_config"]
        heads, width = int(own["num_heads"]), int(own["head_dim"])
        bound = float(own.get("gate_lower_bound") or 0.0)
        taps = int(own["short_conv_kernel_size"])
        sizes = Recurrent(taps, heads, heads, width, width, fading_bound=bound)
    elif "delta_net" in mixers:
        sizes = Recurrent(
            taps=int(config["linear_conv_kernel_dim"]),
            key_heads=int(config["linear_num_key_heads"]),
            value_heads=int(config["linear_num_value_heads"]),
            key_dim=int(config["linear_key_head_dim"]),
            value_dim=int(config["linear_value_head_dim"]),
            tiled=bool(config.get("linear_value_heads_tiled")),
            regroups="hadamard" in config,
            sigmoid_gate=config.get("output_gate_type") == "sigmoid",
        )
    else:
        return None
    if sizes.key_dim % 16 or sizes.value_heads % sizes.key_heads:
        raise ModelUnsupported(
            f"a delta net of {sizes.key_heads} key heads of {sizes.key_dim} and "
            f"{sizes.value_heads} value heads; the cpu engine takes sizes that 16 divides, and "
            "value heads that the key heads divide"
        )
    return sizes
