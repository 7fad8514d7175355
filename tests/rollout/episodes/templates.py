"""Chat templates as Qwen2.5, Llama 3.1 and Hermes 2 Pro have them, shortened to what conversations with tools use."""

from pathlib import Path

from transformers import AutoTokenizer

from mrl.config.config import DataConfig, ModelConfig
from mrl.data.tokenizer import load_tokenizer
from tests.data.folders import byte_bpe_folder

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'You are a helpful assistant.' }}
{%- endif %}{{- '\\n\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

HERMES = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """{%- for message in messages %}
{%- if message.role == 'assistant' and '</think>' in message.content and not loop.last %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' and not loop.last and loop.index0 < messages | length - 2 %}
{{- '<|im_start|>assistant\\nshortened<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Changes what the assistant said before: does not append."""

LLAMA_SPECIAL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]

FORMATS = {"qwen": (QWEN, "<|im_end|>"), "llama": (LLAMA, "<|eot_id|>"), "hermes": (HERMES, "<|im_end|>")}
"""By the name of the tool format: template and end token."""


def chat_tokenizer(folder: Path, template: str, end: str = "<|im_end|>"):
    """mrl's tokenizer of a folder with that template."""
    byte_bpe_folder(folder, chat_template=template, bos=True)
    raw = AutoTokenizer.from_pretrained(str(folder))
    raw.add_special_tokens({"additional_special_tokens": LLAMA_SPECIAL})
    raw.eos_token = end
    raw.chat_template = template
    raw.save_pretrained(str(folder))
    return load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())
