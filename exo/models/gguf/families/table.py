"""Which GGUF files are read: by what they call their architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from exo.errors import ModelUnsupported
from exo.models.gguf.families.compressed import COMPRESSED
from exo.models.gguf.families.dense import DENSE, FALCON_40B, OLMO3
from exo.models.gguf.families.family import Config, GGUFFamily, Metadata
from exo.models.gguf.families.gated import GATED
from exo.models.gguf.families.gemma3n import GEMMA3N
from exo.models.gguf.families.gemma4 import GEMMA4
from exo.models.gguf.families.latents import DEEPSEEK_V2, LATENTS, MISTRAL4
from exo.models.gguf.families.mixtures import MIXTRAL, MIXTURES, routes_by_sigmoid
from exo.models.gguf.families.qwen4 import QWEN4
from exo.models.gguf.families.recurrent import RECURRENT
from exo.models.gguf.families.selective import SELECTIVE

FAMILIES: Mapping[str, GGUFFamily] = {
    **DENSE,
    **MIXTURES,
    **LATENTS,
    **COMPRESSED,
    **RECURRENT,
    **SELECTIVE,
    **GATED,
    "qwen4exp": QWEN4,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
}
"""By `general.architecture`."""

Variant = tuple[Callable[[Metadata], bool], GGUFFamily]

_VARIANTS: Mapping[str, tuple[Variant, ...]] = {
    "llama": ((lambda metadata: bool(metadata("expert_count", 0)), MIXTRAL),),
    "olmo2": ((lambda metadata: bool(metadata("attention.sliding_window", 0)), OLMO3),),
    "deepseek2": (
        (lambda metadata: bool(metadata("attention.temperature_scale", 0)), MISTRAL4),
        (lambda metadata: not routes_by_sigmoid(metadata), DEEPSEEK_V2),
    ),
    "falcon": ((lambda metadata: metadata.has_tensor(".attn_norm_2."), FALCON_40B),),
}
"""Of an architecture there that is several here: which files are of another one."""

_ALL = (
    *FAMILIES.values(),
    *(family for variants in _VARIANTS.values() for _, family in variants),
)
_BY_TYPE = {family.model_type: family for family in _ALL if not family.name}
_BY_NAME = {family.name: family for family in _ALL if family.name}


def family_of(architecture: str, metadata: Metadata) -> GGUFFamily:
    """The family of a file, whose `general.architecture` is given.

    Raises:
        ModelUnsupported: none that exo reads.
    """
    if (family := FAMILIES.get(architecture)) is None:
        raise ModelUnsupported(
            f"the GGUF file is of architecture {architecture!r}; GGUF files are read for "
            f"{', '.join(FAMILIES)}. Use the model's safetensors instead"
        )
    of_another = (one for is_it, one in _VARIANTS.get(architecture, ()) if is_it(metadata))
    return next(of_another, family)


def family_of_config(config: Config) -> GGUFFamily:
    """The family by the config.json made of a file. Raises ModelUnsupported as above."""
    model_type = str(config.get("model_type"))
    family = _BY_NAME.get(str(config.get("gguf_family"))) or _BY_TYPE.get(model_type)
    if family is None:
        raise ModelUnsupported(f"GGUF files of {model_type!r} are not read")
    return family
