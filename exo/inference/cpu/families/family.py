"""What tells an architecture from a llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from exo.inference.cpu.families.blocks import Blocks, no_blocks
from exo.inference.cpu.families.ngrams import Ngrams, no_ngrams
from exo.inference.cpu.families.pools import Pools, no_pools
from exo.inference.cpu.families.positions import Config, full_attention, llama_rope
from exo.inference.cpu.families.rope import RopeTable

Mixer = Literal[
    "attention",
    "delta_net",
    "kimi_delta_net",
    "short_convolution",
    "state_space",
    "selective_scan",
    "attention+state_space",
    "nothing",
]
"""What a layer does with the tokens before: it attends to them, or remembers a state of them, or
both at once."""

_MODULES = {
    "attention": "self_attn",
    "delta_net": "linear_attn",
    "kimi_delta_net": "self_attn",
    "short_convolution": "conv",
    "state_space": "mamba",
    "selective_scan": "mamba",
    "mlp": "mlp",
}
_LLAMA_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


Factor = float | tuple[tuple[int, float], ...]
"""Of a linear layer's weights, or of so many of its rows each, one after the other."""


@dataclass(frozen=True)
class Growth:
    """Llama 4's: a query at `position` is multiplied by 1 + rate * log(1 + (position + ahead) //
    span)."""

    rate: float
    span: int
    ahead: int = 0


@dataclass(frozen=True)
class Experts:
    """A mixture below `mlp`: the router, experts stacked or one by one (`experts.N`).

    `count` and `top` are keys of the config, `layers` says which layers have a mixture, `shared`
    names an expert that every token goes through, in checkpoints that have it, and `shared_gate`
    what scales it, `around` what is between hidden states and the experts where these are narrower,
    `bias` what is added to the scores where experts are chosen, `told`, in layers that have it,
    each token's experts. `routing` is the native Routing's, `normalized` where the config wants a
    sum of 1; `scale` multiplies the weights, `shared_scale` what the shared one gives. `joined`: a
    checkpoint may have all experts' gates over their ups in one tensor, as `experts.gate_up_proj`,
    or, with the axes the other way round, beside them; `alternating`: a gate's number, then an
    up's. Without `gated` there are no gates; with `weighs_inputs` what experts read is weighed, not
    what they give. `groups`: how many there are to choose from, how many are, by how many experts.
    `told_by_config` overrides fields of Architecture."""

    layers: Callable[[Config, int], bool]
    router: str = "gate"
    stacked: str = "switch_mlp"
    routing: str = "SOFTMAX_THEN_TOP"
    normalized: str = "SOFTMAX_THEN_TOP_SUMMED_1"
    normalizes: Callable[[Config], bool] = lambda config: bool(config.get("norm_topk_prob"))
    count: str = "num_experts"
    top: str = "num_experts_per_tok"
    shared: str = ""
    shared_gate: str = ""
    around: tuple[str, str] | None = None
    bias: str = ""
    told: str = ""
    joined: Literal["", "over", "beside"] = ""
    alternating: bool = False
    gated: bool = True
    weighs_inputs: bool = False
    scale: Callable[[Config], float] = lambda config: 1.0
    shared_scale: Callable[[Config], float] = lambda config: 1.0
    groups: Callable[[Config], tuple[int, int, int]] = lambda config: (1, 1, 1)
    told_by_config: Callable[[Config], Mapping[str, str | float]] = lambda config: {}


def _no_scales(config: Config) -> dict[str, float]:
    return {}


def _attends(config: Config, layer: int) -> Mixer:
    return "attention"


def every_layer(config: Config, layer: int) -> bool:
    return True


def _never(config: Config) -> bool:
    return False


def _as_keys(config: Config) -> int:
    return 0


def _in_no_layer(config: Config, layer: int) -> bool:
    return False


def _itself(config: Config, layer: int) -> int:
    return layer


def _no_growth(config: Config, layer: int) -> Growth | None:
    return None


def _not_sparse(config: Config, layer: int) -> float | None:
    return None


def _no_limits(config: Config, layer: int) -> tuple[float, float]:
    return 0.0, 0.0


def _none_plain(config: Config, layer: int) -> str:
    return ""


def _once(config: Config) -> int:
    return 1


def _as_it_is(config: Config) -> Config:
    return config


@dataclass(frozen=True)
class Family:
    """`tied` is whether the head is the embedding; with `tied_by_config` only where the config does
    not say; None: where the checkpoint has no lm_head. `scales` overrides fields of Architecture.
    `head_dim` stands in for a config without one; 0: hidden size over heads.

    `latent_eps` is that of the norms inside attention over latents; 0: the config's.

    `config` gives a configuration a llama's keys, `renames` the tensors a llama's names: parts of
    dotted paths and what to read instead. `raw_norm_offset` is added to norms in checkpoints as
    they were before mlx-lm converted them, and weights there are multiplied by `raw_factors`.
    Where a config has `use_qk_norm`, it decides over `head_norms`.

    `final_norm_offset` is that of the last norm where it is another, `after_norm_eps` the key of
    the config with the epsilon of norms of what a layer's parts give, and `embedding_norm`: hidden
    states begin normed, without weights.

    `output_gate`: what is attended is multiplied by the sigmoid of what stands in the matrix of
    queries, of each head after its query, or of a matrix of its own, `gate_proj`; or by the
    softplus of that, which has a row for each number or for each head.

    `fused_attention`: one matrix has queries, then keys, then values, or of each KV head these.

    `modules` says what a layer calls its parts, `mlps` which layers have an MLP, without `gated`
    one of two matrices, between which with `xielu` is that activation, of numbers of each layer. In
    `parallel` layers it reads what the attention does, through the attention's norm where it has
    none of its own. `in_chunks`: a window is a chunk of positions, of
    which each sees its own. `growth` is that of queries with their positions. `heads`: queries'
    heads, and `head_shape`: KV heads and their size, where layers differ, `value_dim`: the size of
    values, 0 for that of keys, `sinks` which layers have them, `kv_from` the layer whose
    keys and values another reads; `plain_norms` which of q, k and v are normed without weights, and
    where `values_are_keys` values are what becomes the keys. `token_inputs`: the key of the config
    with the size of what tokens bring to each layer. `mixture_norms`: the native MixtureNorms', by
    what a layer calls them; experts have scales there. `layer_scales`: a layer ends in a factor.
    `alt_up`: a hidden state of several streams; `sparsity`: so many deviations above their mean the
    gates' values must lie to go on; `limits`: how large what activations give may be, in experts
    and elsewhere, 0 where there is none, with `limits_inputs` of what they read. `compressed`: the
    native CompressedAttention; `blocks` or `pools`: attention to chosen ones of keys; `ngrams`:
    what several tokens bring together; `hyper`: several hidden states of a token. `loops`: how
    often all layers run, the last norm between them, unless the config has
    `skip_loop_final_norm`."""

    tied: bool | None = True
    tied_by_config: bool = True
    head_dim: int = 0
    activation: str = "SILU"
    norms: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NORMS)
    norm_offset: float = 0.0
    final_norm_offset: float | None = None
    after_norm_eps: str = ""
    embedding_norm: bool = False
    raw_norm_offset: float = 0.0
    raw_factors: Callable[[Config], Mapping[str, Factor]] = lambda config: {}
    layer_norm: bool = False
    head_norms: bool = False
    norm_after_rope: bool = False
    fused_attention: Literal["", "stacked", "by_kv_head"] = ""
    sinks: Callable[[Config, int], bool] = _in_no_layer
    value_dim: Callable[[Config], int] = _as_keys
    output_gate: Literal["", "in_queries", "sigmoid", "softplus"] = ""
    latent: bool = False
    latent_eps: float = 1e-6
    compressed: bool = False
    blocks: Callable[[Config], Blocks | None] = no_blocks
    pools: Callable[[Config], Pools | None] = no_pools
    ngrams: Callable[[Config], Ngrams | None] = no_ngrams
    hyper: bool = False
    explicit_head_dim: bool = True
    rope: Callable[[Config, int], RopeTable | None] = llama_rope
    window: Callable[[Config, int], int] = full_attention
    in_chunks: bool = False
    mixer: Callable[[Config, int], Mixer] = _attends
    mlps: Callable[[Config, int], bool] = every_layer
    gated: bool = True
    xielu: bool = False
    parallel: Callable[[Config], bool] = _never
    growth: Callable[[Config, int], Growth | None] = _no_growth
    heads: Callable[[Config, int], int] | None = None
    head_shape: Callable[[Config, int], tuple[int, int]] | None = None
    kv_from: Callable[[Config, int], int] = _itself
    plain_norms: Callable[[Config, int], str] = _none_plain
    values_are_keys: Callable[[Config, int], bool] = _in_no_layer
    token_inputs: str = ""
    mixture_norms: Mapping[str, str] = field(default_factory=dict)
    layer_scales: bool = False
    alt_up: bool = False
    sparsity: Callable[[Config, int], float | None] = _not_sparse
    limits: Callable[[Config, int], tuple[float, float]] = _no_limits
    limits_inputs: bool = False
    modules: Mapping[str, str] = field(default_factory=lambda: _MODULES)
    scales: Callable[[Config], dict[str, float]] = _no_scales
    experts: Experts | None = None
    loops: Callable[[Config], int] = _once
    config: Callable[[Config], Config] = _as_it_is
    renames: Mapping[str, str] = field(default_factory=dict)
