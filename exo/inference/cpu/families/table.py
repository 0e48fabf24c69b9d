"""Which architectures the cpu engine runs: for each, what tells it from a llama.

The defaults and the arithmetic are those of mlx-lm's class of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping

from exo.inference.cpu.families.dense import DENSE
from exo.inference.cpu.families.family import Family
from exo.inference.cpu.families.gated import GATED
from exo.inference.cpu.families.gemma3n import GEMMA3N
from exo.inference.cpu.families.gemma4 import GEMMA4
from exo.inference.cpu.families.llama4 import LLAMA4, LLAMA4_TEXT
from exo.inference.cpu.families.mixtures import MIXTURES
from exo.inference.cpu.families.recurrent import RECURRENT

FAMILIES: Mapping[str, Family] = {
    **DENSE,
    **MIXTURES,
    **RECURRENT,
    **GATED,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4_TEXT,
}
