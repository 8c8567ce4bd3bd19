"""The sandbox changes what a template may cost, not what it renders: the same text as transformers' own rendering."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ling3.text.chat_template import ChatTemplate
from ling3.train.tokenizer import CHAT_TEMPLATE

# Written for these tests, in the manner of published templates.
TEMPLATES = {
    "nano": CHAT_TEMPLATE,
    "tools": """
{%- if tools %}
    {{- '<sys>' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools></sys>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<sys>' + messages[0].content + '</sys>' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and not
        (message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<a>' }}{% generation %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<call>{"name": "%s", "arguments": ' % call.name }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {%- endgeneration %}{{ '</a>' }}
    {%- elif message.role == "tool" %}
        {{- ('<u>' if loop.first or loop.previtem.role != 'tool' else '') ~ '<r>' ~ content ~ '</r>' }}
        {{- '</u>' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- '<' ~ message.role[:1] ~ '>' ~ content | trim ~ '</' ~ message.role | first ~ '>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<a>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
""",
    "macros": """
{%- macro kind(spec, depth=0) -%}
    {%- if spec is mapping -%}
        {
        {%- for key, value in spec | dictsort -%}
            {{ ', ' if not loop.first }}{{ key | upper }}:{{ kind(value, depth + 1) }}
        {%- endfor -%}
        }
    {%- elif spec is sequence and spec is not string -%}
        [{% for item in spec %}{{ kind(item) }}{% if not loop.last %}, {% endif %}{% endfor %}]
    {%- elif spec is boolean %}{{ spec | string | lower }}
    {%- elif spec is number %}{{ spec | int }}
    {%- else %}{{ spec | replace('"', "'") | title }}{% endif -%}
{%- endmacro %}
{{ bos_token }}
{% for group in messages | groupby('role') %}
{{ group.grouper }}={{ group.list | length }}
{% endfor %}
{% for message in messages | rejectattr('role', 'in', ['system', 'tool']) if message.content %}
{{ loop.index }}. {{ message.content | indent(4) | truncate(60) }}
{% else %}
nobody
{% endfor %}
{% for tool in tools or [] %}
{{ kind(tool) }} {{ tool | tojson(indent=4) }} {{ tool | tojson(separators=(',', ':'), sort_keys=true) }}
{% endfor %}
{{ messages | map(attribute='role') | unique | sort(reverse=true) | join('|') }}
{{ [1.26, 2] | map('round', 1) | list }}
{{ messages[:3] }}
""",
}  # fmt: skip

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"x": ["é", 1.5, None, True, {"deep": [[]]}], "<y>": "a\nb\x01"}},
    }
]
PLAIN = [{"role": "user", "content": " Wie viel ist 1 + 1? \n"}]
LONG = [
    {"role": "system", "content": "Be <brief> & clear.\nAlways."},
    {"role": "user", "content": "1 + 1? 你好 \U0001f600"},
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
    {"role": "user", "content": "and f(2)?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 2, "s": "ü"}}}]},
    {"role": "tool", "content": "4"},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "4", "reasoning_content": "f said so"},
]
CASES = {
    "plain": (PLAIN, {}),
    "plain, no thinking": (PLAIN, {"enable_thinking": False}),
    "plain, thinking": (PLAIN, {"enable_thinking": True}),
    "four turns": (LONG[:4], {}),
    "tools": (LONG, {"tools": TOOLS}),
    "tools, finished": (LONG, {"tools": TOOLS, "add_generation_prompt": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_what_transformers_renders(template, case):
    messages, given = CASES[case]
    variables = {"add_generation_prompt": True, "bos_token": "<s>", **given}
    if template == "nano" and "tools" in case:
        messages = [message for message in messages if message["role"] != "tool"]
    wanted, _ = render_jinja_template([messages], chat_template=TEMPLATES[template], **variables)
    assert ChatTemplate(TEMPLATES[template]).render(messages, **variables) == wanted[0]
