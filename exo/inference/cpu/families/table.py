"""Which architectures the cpu engine runs: for each, what tells it from a llama.

The defaults and the arithmetic are those of mlx-lm's class of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping

from exo.inference.cpu.families.compressed import COMPRESSED
from exo.inference.cpu.families.dense import DENSE
from exo.inference.cpu.families.family import Family
from exo.inference.cpu.families.gated import GATED
from exo.inference.cpu.families.gemma3n import GEMMA3N
from exo.inference.cpu.families.gemma4 import GEMMA4
from exo.inference.cpu.families.latents import LATENTS
from exo.inference.cpu.families.llama4 import LLAMA4, LLAMA4_TEXT
from exo.inference.cpu.families.mixtures import MIXTURES
from exo.inference.cpu.families.recurrent import RECURRENT
from exo.inference.cpu.families.selective import SELECTIVE
from exo.inference.cpu.families.sigmoid_mixtures import SIGMOID_MIXTURES

_NAMED: Mapping[str, Family] = {
    **DENSE,
    **MIXTURES,
    **SIGMOID_MIXTURES,
    **LATENTS,
    **COMPRESSED,
    **RECURRENT,
    **SELECTIVE,
    **GATED,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4_TEXT,
}

ALIASES = {
    "mistral": "llama",
    "iquestcoder": "llama",
    "xverse": "llama",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "joyai_llm_flash": "deepseek_v3",
    "minimax_m2": "minimax",
    "gemma4_unified": "gemma4",
    "falcon_mamba": "mamba",
}
"""Names in config.json of what is another family for text, as in mlx-lm's MODEL_REMAPPING."""

FAMILIES: Mapping[str, Family] = {
    **_NAMED,
    **{name: _NAMED[family] for name, family in ALIASES.items()},
}
"""By config.json's `model_type`."""
