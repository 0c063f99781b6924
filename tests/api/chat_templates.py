"""Chat templates in the style of well-known model families, written for these tests."""

CHATML = """
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
{%- if system or tools is not none %}
<|start|>system<|end|>

{% if tools is not none %}{{ "Tools: " + (tools | map(attribute='function') | map(attribute='name') | join(', ')) }}
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{{- "\\n\\n" }}{% endfor %}{% endif %}
{{- system }}<|eot|>
{%- endif %}
{%- for message in rest %}
    {%- if 'tool_calls' in message and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant<|end|>\\n\\n' }}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>
    {%- elif message.role in ('tool', 'ipython') %}
{{- '<|start|>ipython<|end|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- else %}
{{- '<|start|>' ~ message['role'] ~ '<|end|>\\n\\n' ~ (message['content'] | default('', true) | trim) ~ '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""

BRACKETS = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0, seen=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- set ns.seen = ns.seen + 1 %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] in ["tool_results", "tool"] %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' }}
        {{- (message.tool_call_id or "none") + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("no such role: " + message["role"]) }}{%- endif %}
{%- endfor %}"""

THINKING = """
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable %}{% for part in content %}{{ part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- text_of(messages[0].content) + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text_of(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content is string
        and message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = text_of(message.content) %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>' ~ message.role ~ '\\n<think>\\n' ~ reasoning.strip('\\n') }}
            {{- '\\n</think>\\n\\n' ~ content }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

ODDS_AND_ENDS = """{# what is left of the language #}
{%- set all = {'a': 1, 'b': [1, 2.5, none, true], "c": {'d': ()}} -%}
{%- macro indented(text, by=2, mark='-') -%}
{{ mark ~ text | indent(by, true) }}{{ varargs }}{{ kwargs }}{%- endmacro -%}
{%- call(x) indented('one') %}{{ x }}{% endcall -%}
{%- for key, value in all | dictsort %}{{ key }}={{ value | tojson(sort_keys=true) }};
{{- loop.cycle('x', 'y') }}{% else %}no{% endfor %}
{%- for message in messages recursive %}{{ loop.depth0 }}{% if loop.index > 3 %}{% break %}{% endif -%}
{% generation %}{{ message.content | upper | replace('A', 'aa') | truncate(20) }}{% endgeneration %}{% endfor %}
{%- filter trim | lower %}  SHOUT {{ messages | length }}  {% endfilter -%}
{{ [3, 1, 2] | sort | reverse | list }}{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ range(2, 9, 3) | list }}
{{ 'x' * 3 ~ 2 ** 5 ~ 7 // 2 ~ 7 % 4 ~ (7 / 2) | round(1) }}{{ '%s and %05.2f' | format('a', 3.14159) }}
{{ '%-5s|' % 'ab' }}{{ '{0:>6}|{name!r}'.format('z', name=[1]) }}{{ ' a,b , c'.split(',') | map('trim') | join('+') }}
{{ messages | groupby('role') | map(attribute='grouper') | list }}{{ ['b', 'a', 'b'] | unique | list }}
{{ [[1], [2, 3]] | sum(start=[]) }}{{ [1, 2, 3] | sum }}{{ [1, 2, 3] | select('odd') | list }}
{{- none | default('d', true) }}
{%- set block %}{% for i in range(3) %}{{ i }},{% endfor %}{% endset %}{{ block | length }}{{ block[::-1] }}
{{- 'Title case here' | title | wordcount }}{{ "<b>&" | escape }}{{ "<b>&" | e | safe }}{{ 1 if false }}
{{- dict(a=1, **{'b': 2}) | items | list }}{{ dict.fromkeys(['k'], 0) }}{{ ('a', 'b') | last }}
{{- 'é' | tojson(ensure_ascii=true) }}
{{- 'a' in 'cat' and 1 < 2 <= 2 and 3 not in [1, 2] and not none }}{{ strftime_now('%Y') | length }}
{{- 3 is divisibleby 3 }}
{%- set c = cycler('odd', 'even') %}{{ c.next() }}{{ c.next() }}{{ joiner(', ')() }}
{{- [1, 2] + [3] }}{{ 'abc' | first }}
"""

ALL = {
    "chatml": CHATML,
    "headers": HEADERS,
    "brackets": BRACKETS,
    "thinking": THINKING,
    "odds and ends": ODDS_AND_ENDS,
}
