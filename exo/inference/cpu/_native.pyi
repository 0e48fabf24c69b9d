"""Types of the module that native/bindings.cpp builds."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

class CacheMissError(Exception): ...
class CacheFullError(Exception): ...

class DType(Enum):
    F32 = 0
    F16 = 1
    BF16 = 2

class Table(Enum):
    NONE = 0
    IQ4 = 1
    E2M1 = 2

class Activation(Enum):
    SILU = 0
    GELU_TANH = 1
    GELU = 2
    CLAMPED_SWIGLU = 3
    SIGMOID = 4
    RELU2 = 5

class Routing(Enum):
    SOFTMAX_THEN_TOP = 0
    SOFTMAX_THEN_TOP_SUMMED_1 = 1
    TOP_THEN_SOFTMAX = 2
    TOP_THEN_SIGMOID = 3
    SIGMOID = 4
    SIGMOID_SUMMED_1 = 5
    ROOT_SOFTPLUS_SUMMED_1 = 6

class Matrix:
    rows: int
    cols: int
    nbytes: int
    def set_bias(self, bias: list[float]) -> None: ...
    def apply(
        self, x: npt.NDArray[np.float32], precise: bool = False
    ) -> npt.NDArray[np.float32]: ...
    def read_rows(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]: ...

def pack_affine(
    values: Bytes,
    scales: Bytes,
    biases: Bytes,
    dtype: DType,
    rows: int,
    cols: int,
    bits: int,
    group: int,
    table: Table = Table.NONE,
) -> Matrix: ...
def ggml_formats() -> dict[str, tuple[int, int]]:
    """Columns and bytes of a block, by format."""

class Grid(Enum):
    IQ2_XXS = ...
    IQ2_XS = ...
    IQ2_S = ...
    IQ3_XXS = ...
    IQ3_S = ...
    IQ1_S = ...

def set_grid(grid: Grid, places: npt.NDArray[np.uint8]) -> None: ...
def pack_ggml(values: Bytes, format: str, rows: int, cols: int) -> Matrix: ...
def pack_dense(values: Bytes, dtype: DType, rows: int, cols: int) -> Matrix: ...
def pack_columns(
    values: Bytes, dtype: DType, width: int, first: int, step: int, rows: int, cols: int
) -> Matrix: ...
def pack_float4(values: Bytes, scales: Bytes, scale: float, rows: int, cols: int) -> Matrix: ...
def pack_float8(
    values: Bytes, scales: npt.NDArray[np.float32], rows: int, cols: int, group: int
) -> Matrix: ...
def guard_map(map: Bytes) -> int: ...
def lost_pages(guard: int) -> int: ...
def unguard_map(guard: int) -> None: ...

class Rope:
    frequencies: list[float]
    scale: float
    interleaved: bool

class Expert:
    gate: Matrix
    up: Matrix
    down: Matrix

class ExpertMemory:
    def __init__(
        self, limit_bytes: int, pack: Callable[[int, list[int]], list[Expert]]
    ) -> None: ...
    def take(self, layer: int, numbers: list[int]) -> list[Expert]: ...
    def keep_only(self, layers: list[int]) -> None: ...
    def set_limit(self, bytes: int) -> None: ...
    bytes: int
    taken: int
    packed: int

class Convolution:
    weights: list[float]
    bias: list[float]
    taps: int

class DeltaNet:
    qkv: list[Matrix]
    z: Matrix
    a: Matrix
    b: Matrix
    out: Matrix
    z_down: Matrix
    a_down: Matrix
    convolution: Convolution
    decay: list[float]
    dt_bias: list[float]
    norm: list[float]
    sigmoid_gate: bool
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    by_key: bool
    fading_bound: float
    tiled: bool
    regroups: bool

class ShortConvolution:
    b: Matrix
    c: Matrix
    x: Matrix
    out: Matrix
    convolution: Convolution

class SelectiveScan:
    x: Matrix
    gate: Matrix
    step_b_c: Matrix
    step: Matrix
    out: Matrix
    convolution: Convolution
    rates: list[float]
    skip: list[float]
    step_norm: list[float]
    b_norm: list[float]
    c_norm: list[float]
    state_dim: int
    norm_eps: float

class StateSpace:
    xbc: Matrix
    gate: Matrix
    dt: Matrix
    out: Matrix
    convolution: Convolution
    decay: list[float]
    dt_bias: list[float]
    skip: list[float]
    norm: list[float]
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    norm_groups: int
    least_step: float
    most_step: float

class Indexer:
    q: Matrix
    k: Matrix
    weights: Matrix
    k_norm: list[float]
    k_norm_bias: list[float]
    heads: int
    dim: int
    pools: Compressor
    interleaved: bool
    turns_last: bool
    norm_eps: float

class BlockIndexer:
    q: Matrix
    k: Matrix
    q_norm: list[float]
    k_norm: list[float]
    dim: int
    size: int
    most: int
    local: int

class Compressor:
    kv: Matrix
    gate: Matrix
    bias: list[float]
    norm: list[float]
    dim: int
    ratio: int
    overlaps: bool
    turns_first: bool

class PoolIndexer:
    q: Matrix
    q_norm: list[float]
    pools: Compressor
    heads: int
    dim: int
    most: int

class Ngrams:
    rows: Callable[[list[int]], Matrix]
    multipliers: list[int]
    sizes: list[int]
    starts: list[int]
    end: int
    key: Matrix
    value: Matrix
    key_norm: list[float]
    query_norm: list[float]
    convolution_norm: list[float]
    convolution: Convolution
    dilation: int

class CompressedAttention:
    q_a: Matrix
    q_b: Matrix
    kv: Matrix
    q_a_norm: list[float]
    kv_norm: list[float]
    out: list[Matrix]
    compressor: Compressor
    index_compressor: Compressor
    indexer: Indexer
    dim: int
    window: int
    most: int

class HyperConnection:
    mix: Matrix
    down: Matrix
    up: Matrix
    norm: list[float]
    base: list[float]
    scales: list[float]

class LatentAttention:
    most: int
    pool: int
    indexer: Indexer
    q_a: Matrix
    q_b: Matrix
    kv_a: Matrix
    q_a_norm: list[float]
    kv_a_norm: list[float]
    embed: list[Matrix]
    unembed: list[Matrix]
    norm_eps: float
    nope: int
    turned: int
    rank: int
    value_dim: int

class TokenInput:
    gate: Matrix
    out: Matrix
    norm: list[float]

class TokenInputs:
    embedding: Matrix
    projection: Matrix
    norm: list[float]
    embedding_scale: float
    projection_scale: float
    scale: float

class AltUp:
    router: Matrix
    router_norm: list[float]
    predict: list[float]
    correct: list[float]
    scale: list[float]
    left: Matrix
    right: Matrix
    laurel_norm: list[float]

class Streams:
    begin: list[Matrix]
    end: list[Matrix]
    active: int

class MixtureNorms:
    router: list[float]
    experts: list[float]
    after_experts: list[float]
    after_mlp: list[float]

class Xielu:
    def __init__(self, alpha_p: float, alpha_n: float, beta: float, eps: float) -> None: ...

class Layer:
    attention_norm: list[float]
    after_attention_norm: list[float]
    mlp_norm: list[float]
    after_mlp_norm: list[float]
    attention_norm_bias: list[float]
    mlp_norm_bias: list[float]
    attention_inner_norm: list[float]
    mlp_inner_norm: list[float]
    parallel: bool
    query_growth: float
    query_span: int
    query_ahead: int
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    output_gate: Matrix
    softplus_gate: bool
    q_norm: list[float]
    k_norm: list[float]
    v_norm: list[float]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    value_scale: float
    kv_from: int
    norm_after_rope: bool
    sinks: list[float]
    rope: int
    window: int
    in_chunks: bool
    gate: Matrix
    up: Matrix
    down: Matrix
    router: Matrix
    router_bias: list[float]
    xielu: Xielu
    shared_gate: Matrix
    shared_scale: float
    expert_in: Matrix
    expert_out: Matrix
    experts: list[Expert]
    expert_memory: ExpertMemory
    number: int
    expert_scales: list[float]
    mixture_norms: MixtureNorms
    token_input: TokenInput
    alt_up: AltUp
    sparse: bool
    deviations: float
    expert_limit: float
    limit: float
    scale: float
    blocks: BlockIndexer
    pooled: PoolIndexer
    ngrams: Ngrams
    latent: LatentAttention
    compressed: CompressedAttention
    attention_streams: HyperConnection
    mlp_streams: HyperConnection
    experts_of_tokens: list[int]
    delta_net: DeltaNet
    short_convolution: ShortConvolution
    state_space: StateSpace
    selective_scan: SelectiveScan

class Spec:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_norm: bool
    norm_eps: float
    after_norm_eps: float
    attention_scale: float
    attention_soft_cap: float
    activation: Activation
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    logits_soft_cap: float
    experts_per_token: int
    routing: Routing
    expert_scale: float
    expert_band: float
    weighs_inputs: bool
    limits_inputs: bool
    streams: int
    sinkhorn_rounds: int
    stream_eps: float
    stream_magnitude: float
    stream_least: float
    expert_groups: int
    groups_per_token: int
    judged_per_group: int
    precise: bool
    kv_bits: int
    cache_limit_bytes: int

class Slice:
    def __init__(
        self, sequence: str, start: int, length: int, logits: int, keeps: bool = False
    ) -> None: ...

class Hadamard:
    def __init__(self, block: int, signs: Mapping[int, list[float]]) -> None: ...
    def turned(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...

class Model:
    layers: list[Layer]
    ropes: list[Rope]
    embedding: Matrix
    head: Matrix
    token_inputs: TokenInputs
    streams: Streams
    last_streams: HyperConnection
    embedding_norm: list[float]
    final_norm: list[float]
    final_norm_bias: list[float]
    norm_every: int
    def set_hadamard(self, hadamard: Hadamard, embedding: bool) -> None: ...
    sequences: int
    cache_bytes: int
    page_bytes: int
    state_bytes: int
    states: int
    cache_pages: int
    cache_limit_bytes: int
    def __init__(self, spec: Spec) -> None: ...
    def check_sizes(self) -> None: ...
    def forward(
        self, slices: list[Slice], tokens: npt.NDArray[np.int32], hidden: npt.NDArray[Any] | None
    ) -> npt.NDArray[np.float32]: ...
    def final_states(self) -> npt.NDArray[np.float32]: ...
    def release(self, sequence: str) -> None: ...
    def take_over(self, sequence: str, source: str, tokens: int) -> None: ...

PAGE_TOKENS: int

def isa() -> str: ...
def isas() -> list[str]: ...
def choose_isa(name: str) -> None: ...
def set_threads(count: int) -> None: ...
def threads() -> int: ...
def read_all(values: Bytes) -> int: ...
