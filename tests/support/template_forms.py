"""The forms of published chat templates, over tokens of nano's tokenizer."""

# The form of Ling-3's own: thinking on by default, the system's message first, earlier thoughts left out.
LING = """
{%- set thinking_option = 'on' if enable_thinking is not defined or enable_thinking else 'off' %}
{%- macro turn(role, content) -%}
<role>{{ role }}</role>{{ content }}<|role_end|>
{%- endmacro %}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content + '\\n' %}
{%- endif %}
{{- turn('SYSTEM', ns.system ~ 'detailed thinking ' ~ thinking_option) }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- turn('HUMAN', message.content) }}
    {%- elif message['role'] == 'assistant' %}
        {{- turn('ASSISTANT', message.content.split('</think>')[-1].lstrip('\\n')) }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<role>ASSISTANT</role>\\n<think>' }}
    {%- if thinking_option == 'off' %}{{ '</think>' }}{% endif %}
{%- endif %}
"""

# The forms of published templates: Llama 3's, which keeps all; Qwen3's, which drops the reasoning of earlier turns.
LLAMA = """{%- for m in messages -%}<|{{ m.role }}|>

{{ m.content | trim }}<|role_end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>

{% endif -%}"""
QWEN = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|role_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{%- endif -%}"""
