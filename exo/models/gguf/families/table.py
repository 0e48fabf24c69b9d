"""Which GGUF files are read: by what they call their architecture."""

from __future__ import annotations

from collections.abc import Mapping

from exo.errors import ModelUnsupported
from exo.models.gguf.families.dense import DENSE, OLMO3
from exo.models.gguf.families.family import GGUFFamily
from exo.models.gguf.families.gemma3n import GEMMA3N
from exo.models.gguf.families.gemma4 import GEMMA4
from exo.models.gguf.families.mixtures import MIXTRAL, MIXTURES
from exo.models.gguf.families.recurrent import RECURRENT

FAMILIES: Mapping[str, GGUFFamily] = {
    **DENSE,
    **MIXTURES,
    **RECURRENT,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
}
"""By `general.architecture`."""

_BY_TYPE = {family.model_type: family for family in (*FAMILIES.values(), MIXTRAL, OLMO3)}


def family_of(architecture: str, *, mixture: bool, windows: bool) -> GGUFFamily:
    """The family of a file's `general.architecture`; `mixture`: it has experts; `windows`: layers
    that see no further.

    Raises:
        ModelUnsupported: none that exo reads.
    """
    if architecture == "llama" and mixture:
        return MIXTRAL
    if architecture == "olmo2" and windows:
        return OLMO3
    if (family := FAMILIES.get(architecture)) is None:
        raise ModelUnsupported(
            f"the GGUF file is of architecture {architecture!r}; GGUF files are read for "
            f"{', '.join(FAMILIES)}. Use the model's safetensors instead"
        )
    return family


def family_of_type(model_type: str) -> GGUFFamily:
    """The family by config.json's model_type. Raises ModelUnsupported as above."""
    if (family := _BY_TYPE.get(model_type)) is None:
        raise ModelUnsupported(f"GGUF files of {model_type!r} are not read")
    return family
