"""A model that thinks before it answers: real tokens, a real template, random weights."""

from __future__ import annotations

import json
from pathlib import Path

import zoo
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKERS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }} Write <tool_call> {"name": ..., "arguments": ...} </tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""


def write_thinker(folder: Path) -> Path:
    """A checkpoint whose tokens are bytes and the markers of Qwen 3."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for marker in MARKERS:
        token = AddedToken(marker, normalized=False, special=marker.startswith("<|"))
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    end = tokenizer.token_to_id("<|im_end|>")
    config = zoo.tiny_config("llama") | {"vocab_size": 260, "eos_token_id": end}
    zoo.write_checkpoint("llama", folder, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
