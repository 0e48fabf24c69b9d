"""Llama 4: attention in chunks with positions, over everything without, and experts that read
what is weighed.

The arithmetic is that of mlx-lm's llama4, with the configuration's epsilon in the norms of heads as
in transformers and llama.cpp; llama4_text is another model of the family, MobileLLM-R1's.
"""

from __future__ import annotations

from exo.inference.cpu.families.family import Experts, Family, Growth
from exo.inference.cpu.families.positions import Config, llama_rope
from exo.inference.cpu.families.rope import RopeTable

_NAMES = {"feed_forward": "mlp", "output": "lm_head"}


def _sees_all(layer: int) -> bool:
    return (layer + 1) % 4 == 0


def _rope(config: Config, layer: int) -> RopeTable | None:
    return None if _sees_all(layer) else llama_rope({**config, "rope_traditional": True}, layer)


def _window(config: Config, layer: int) -> int:
    return 0 if _sees_all(layer) else int(config["attention_chunk_size"])


def _growth(config: Config, layer: int) -> Growth | None:
    if not (_sees_all(layer) and config.get("attn_temperature_tuning", 4)):
        return None
    return Growth(config.get("attn_scale", 0.1), int(config.get("floor_scale", 8192)), ahead=1)


def _plain_norms(config: Config, layer: int) -> str:
    return "qk" if config["use_qk_norm"] and not _sees_all(layer) else ""


def _has_experts(config: Config, layer: int) -> bool:
    step = int(config["interleave_moe_layer_step"])
    return layer % step == step - 1


def _text_rope(config: Config, layer: int) -> RopeTable | None:
    if not config["no_rope_layers"][layer]:  # it says where positions are turned
        return None
    return llama_rope({**config, "rope_traditional": True, "rope_scaling": None}, layer)


LLAMA4 = Family(
    tied=False,
    tied_by_config=False,
    rope=_rope,
    window=_window,
    in_chunks=True,
    growth=_growth,
    plain_norms=_plain_norms,
    norm_after_rope=True,
    experts=Experts(
        _has_experts,
        router="router",
        stacked="experts",
        joined="beside",
        routing="TOP_THEN_SIGMOID",
        normalizes=lambda config: False,
        count="num_local_experts",
        shared="shared_expert",
        weighs_inputs=True,
    ),
    renames=_NAMES,
)
LLAMA4_TEXT = Family(
    rope=_text_rope,
    plain_norms=lambda config, layer: "qk" if config["use_qk_norm"] else "",
    renames=_NAMES,
)
