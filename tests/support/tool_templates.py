"""Chat template that treats reasoning and tools as hybrid reasoning models' templates do, in two variants.

Common to both: the generation prompt opens the reasoning; that of the assistant's messages is rendered only after the
last message of a user (a tool's result is not one), and left out of earlier turns.

- "marked" (`chat_template_kwargs` none): each message ends in a token of its own, tool calls are JSON, results stand in
  a user's message, and an earlier answer has no trace of its reasoning.
- "open" (`{"manner": "open"}`): a message ends where the next one's role begins, arguments stand between tags, and an
  earlier answer keeps an empty reasoning.
"""

# The reasoning comes in a field of its own, or before the content as the model wrote it.
_SPLIT = r"""
{%- macro reasoning_of(message) -%}
    {%- if message.reasoning_content is string %}{{ message.reasoning_content.strip('\n') }}
    {%- elif '</think>' in message.content %}
        {{- message.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}
    {%- endif %}
{%- endmacro -%}
{%- macro words_of(message) -%}{{ message.content.split('</think>')[-1].strip('\n') }}{%- endmacro -%}
{%- set asked = namespace(at=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' %}{% set asked.at = loop.index0 %}{% endif -%}
{%- endfor -%}
"""

_MARKED = r"""
{%- if tools -%}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > asked.at and (loop.last or reasoning_of(message)) %}
            {{- '<think>\n' + reasoning_of(message) + '\n</think>\n\n' }}
        {%- endif %}
        {{- words_of(message) }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if words_of(message) or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""

_OPEN = r"""
{%- if tools -%}
    {{- '<|system|>\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- elif message.role == 'assistant' -%}
        {{- '<|assistant|>' }}
        {{- '<think>' + (reasoning_of(message) if loop.index0 > asked.at else '') + '</think>' + words_of(message) }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key><arg_value>' }}
                {{- value if value is string else value | tojson }}{{ '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- else %}{{ '<|' + message.role + '|>\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}
"""

TOOL_TEMPLATE = _SPLIT + "{%- if manner == 'open' -%}" + _OPEN + "{%- else -%}" + _MARKED + "{%- endif -%}"
