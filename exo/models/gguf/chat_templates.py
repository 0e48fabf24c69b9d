"""Chat templates for files that have none, by the tokens with which their models mark turns.

Ollama's own files leave out what its engine knows. The forms are those of the models' cards.
"""

from __future__ import annotations

from collections.abc import Collection

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
_GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('no system messages') }}{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
_MISTRAL = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{ '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
{%- elif message['role'] == 'user' -%}{{ '[INST]' + message['content'] + '[/INST]' }}
{%- else -%}{{ message['content'] + eos_token }}
{%- endif -%}
{%- endfor -%}
"""
_HARMONY = """\
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n' -}}
{{- 'Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\n' -}}
{{- 'Reasoning: ' + (reasoning_effort or 'medium') + '\n\n# Valid channels: analysis, ' -}}
{{- 'commentary, final. Channel must be included for every message.<|end|>' -}}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{{ '<|start|>developer<|message|># Instructions\n\n' + message['content'] + '<|end|>' }}
{%- elif message['role'] == 'assistant' -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] + '<|end|>' }}
{%- else -%}
{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""
_BY_TOKENS = {
    ("<|start|>", "<|channel|>", "<|message|>"): _HARMONY,
    ("<start_of_turn>", "<end_of_turn>"): _GEMMA,
    ("[INST]", "[/INST]", "[SYSTEM_PROMPT]"): _MISTRAL,
    ("<|im_start|>", "<|im_end|>"): _CHATML,
}


def usual_template(tokens: Collection[str]) -> str | None:
    """Of models with these tokens in their vocabulary; None: of none that is known here."""
    known = set(tokens)
    return next((text for marks, text in _BY_TOKENS.items() if known.issuperset(marks)), None)
