"""The chat template of the trained model: ChatML, with reasoning, tool calls as JSON, and results in a user's message.

Reasoning is shown only after the last message of a user (a tool's result is not one); earlier turns leave it out.  The
model opens its reasoning by itself, unless `enable_thinking` is false, or `open_thinking` opens it in the prompt.
What instructs at the beginning stands in one message with the tools.  Later instructions stand where they are, but that
one right after a user's message is shown before it: the model looks at the last lines only.

mlx-lm knows by the words ``<tool_call>`` and ``tool_call.name`` that calls are JSON.
"""

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|pad|>"]

AGENT_TEMPLATE = r"""
{%- set INSTRUCTING = ('system', 'developer') -%}
{%- set asked = namespace(at=-1, begun=0, system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'user' %}{% set asked.at = loop.index0 %}{% endif -%}
    {%- if message.role in INSTRUCTING and loop.index0 == asked.begun -%}
        {%- set asked.begun = loop.index -%}
        {%- set asked.system = asked.system + ('\n\n' if asked.system else '') + message.content -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools or asked.system -%}
    {{- '<|im_start|>system\n' + asked.system }}
    {%- if tools -%}
        {{- '\n\n' if asked.system }}{{ '# Tools\n' }}
        {%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
    {%- endif -%}
    {{- '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + (message.content or '').strip('\n') + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif message.role == 'assistant' -%}
        {%- set words = (message.content or '').split('</think>')[-1].strip('\n') -%}
        {%- set reasoning = message.reasoning_content or '' -%}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > asked.at and reasoning %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- words }}
        {%- for call in message.tool_calls or [] %}
            {%- set tool_call = call.function %}
            {{- '\n' if words or not loop.first }}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'user' %}
        {%- if loop.nextitem is defined and loop.nextitem.role in INSTRUCTING %}
            {{- '<|im_start|>system\n' + loop.nextitem.content + '<|im_end|>\n' }}
        {%- endif %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role in INSTRUCTING and loop.index0 >= asked.begun and loop.previtem.role != 'user' %}
        {{- '<|im_start|>system\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}
    {%- elif open_thinking %}{{ '<think>\n' }}
    {%- endif %}
{%- endif %}
"""
