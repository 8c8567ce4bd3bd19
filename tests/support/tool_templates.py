"""Chat templates with tools, written for these tests in the manner of published ones, over nano's tokenizer."""

import tokenizers

import ling3
from ling3.text.chat_template import ChatTemplate

HEAD = """
{%- set thinking = enable_thinking is defined and enable_thinking -%}
{%- if tools -%}
<role>SYSTEM</role># Tools{{ '\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}<|role_end|>
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}<role>OBSERVATION</role>{{ m.content }}<|role_end|>
{%- elif m.role == 'user' or m.role == 'system' -%}<role>HUMAN</role>{{ m.content }}<|role_end|>
{%- else -%}<role>ASSISTANT</role>{{ '\\n' }}<think></think>{{ m.content }}
{%- for c in m.tool_calls or [] -%}{%- set c = c.function -%}
"""
TAIL = """
{%- endfor -%}<|role_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<role>ASSISTANT</role>{{ '\\n' }}<think>{{ '' if thinking else '</think>' }}
{%- endif -%}
"""
CALLS = {
    "tags": """
{{- '\\n<tool_call>' + c.name -}}
{%- for k, v in c.arguments.items() -%}
<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{%- endfor -%}
</tool_call>""",
    "json": """
{{- '\\n<tool_call>\\n{"name": "' + c.name + '", "arguments": ' + (c.arguments | tojson) + '}\\n</tool_call>' -}}""",
    "bare": """
{{- '{"name": "' + c.name + '", "parameters": ' + (c.arguments | tojson) + '}' -}}""",
}
TEMPLATES = {form: HEAD.strip() + calls.strip() + TAIL.strip() for form, calls in CALLS.items()}


TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>")


def tokenizer(template, special=False):
    """Nano's, with another chat template; if `special`, with special tokens for the tags of tool calls."""
    made = ling3.load_tokenizer("nano")
    if special:
        made.backend.add_special_tokens([tokenizers.AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    made.chat_templates = {"default": ChatTemplate(template)}
    return made
