"""Templates that use too much time or memory: each fails quickly, and affects no other."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.api.chat import ChatRenderer
from quire.api.templates.budget import TemplateLimits
from quire.errors import ValidationError
from tests.conftest import tiny_tokenizer

SECONDS = 0.2
HELLO = [{"role": "user", "content": "hello"}]

RUNAWAY = {
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops with a test": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive loops": "{% for i in range(9) recursive %}{% if loop.depth < 12 %}"
    "{{ loop(range(9)) }}{% endif %}{% endfor %}",
    "lazy filters": "{% for i in range(9999) %}{{ range(9999) | select | reject('none') | list | length }}{% endfor %}",
    "mapped filters": "{% for i in range(99999) %}{{ range(99999) | map('string') | map('length') | sum }}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "macros that branch": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "a block that calls itself": "{% block b %}{{ self.b() }}{% endblock %}",
    "a loop of comparisons": "{% set x = 'a' * 4000000 %}{% set y = 'a' * 3999999 ~ 'a' %}"
    "{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
    "straight comparisons": "{% set x = [0] * 2000000 %}{% set y = [0] * 2000000 %}" + "{{ 1 if x == y }}" * 2000,
    "slow searches": "{{ ('a' * 8000000).rfind('b' ~ 'a' * 4000000) }}",
    "slow stripping": "{{ ('a' * 8000000).strip('b' * 4000000 ~ 'a') }}",
    "searches in a row": "{% set x = 'a' * 8000000 %}" + "{{ 'b' in x }}" * 3000,
}

EXPLOSIVE = {
    "a product": "{{ 'a' * 10**9 }}",
    "a product the other way": "{{ 10**9 * 'a' }}",
    "a list's product": "{{ ([0] * 10**9) | length }}",
    "products of products": "{{ ('a' * 3000) * 3000 * 3000 }}",
    "a power": "{{ 10**(10**10) }}",
    "powers of powers": "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling a list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by join": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    "doubling by replace": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "doubling in a block": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}{% endfor %}",
    "doubling in format": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubling in printf": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "a list in itself, twice over": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "the same, compared": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "the same, as a key": "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}"
    "{% endfor %}{{ {ns.x: 1} }}",
    "the same, by arguments": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}"
    "{{ varargs }}{% endif %}{% endmacro %}{{ f(60, 1, 1) }}",
    "namespaces in each other": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}{{ 'a' * 10**9 }}",
    "a very deep list": "{% set ns = namespace(x=()) %}{% for i in range(99999) %}{% set ns.x = (ns.x,) %}{% endfor %}"
    "{{ {ns.x: 1} }}",
    "center": "{{ 'a' | center(10**9) }}",
    "the method center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ ('\\t' * 1000).expandtabs(10**6) }}",
    "indent": "{{ 'a' | indent(10**9, true) }}",
    "indent of many lines": "{{ ('a\\n' * 100000) | indent(100000) }}",
    "tojson": "{{ [[[1]]] | tojson(indent=10**9) }}",
    "tojson of many": "{{ range(99999) | list | tojson(indent=1000) }}",
    "tojson with long separators": "{{ range(99999) | list | tojson(separators=('a' * 99999, ':')) }}",
    "tojson with a long indent": "{{ range(9999) | list | tojson(indent='a' * 99999) }}",
    "a list of characters": "{{ ('\u4e2d' * 8000000) | list | length }}",
    "a list of words": "{{ ('a ' * 4000000) | wordcount }}{{ ('a ' * 4000000) | title | length }}",
    "a date": "{{ strftime_now('%1000000000Y') }}",
    "a long date": "{{ strftime_now('%c' * 4000000) | length }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "printf": "{{ '%1000000000d' % 1 }}",
    "printf with a star": "{{ '%*d' % (10**9, 1) }}",
    "printf with precision": "{{ '%.1000000000f' % 1.5 }}",
    "printf of many": "{{ ('%4000d' * 100000) % ((1,) * 100000) }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format, nested": "{{ '{:{}}'.format(1, 10**9) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format of many": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "encode": "{{ 'a'.encode() }}",
    "translate": "{{ ('a' * 10**6).translate({97: 'a' * 10**6}) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "join": "{{ range(99999) | join('a' * 99999) }}",
    "the method join": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "split": "{{ ('a ' * 4000000).split(' ') | length }}",
    "sum of lists": "{{ ([[0] * 99999] * 999) | sum(start=[]) | length }}",
    "many values kept": "{% set x = 'a' * 4000000 %}" + "".join(f"{{% set a{i} = x ~ {i} %}}" for i in range(900)),
    "many slices kept": "{% set x = 'a' * 4000000 %}" + "".join(f"{{% set a{i} = x[1:] %}}" for i in range(900)),
    "much output": "{% set x = 'a' * 99999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "much plain output": "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "much output of a macro": "{% macro f() %}{% for i in range(99999) %}"
    + "a" * 9999
    + "{% endfor %}{% endmacro %}{{ f() }}",
    "a constant folded away": "{% if false %}{{ 'a' * 10**9 }}{% endif %}{{ 'a' | center(10**9) }}",
}

ESCAPES = {
    "a class": "{{ ''.__class__ }}",
    "its bases": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by subscript": "{{ ''['__class__']['__mro__'] }}",
    "by attr": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "by map": "{{ [''] | map(attribute='__class__') | list | first | attr('mro') }}",
    "by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "by format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "a global's globals": "{{ cycler.__init__.__globals__ }}",
    "a function's code": "{{ raise_exception.__code__ }}",
    "the environment": "{{ self.environment.filters }}{{ self._TemplateReference__context.environment }}",
    "a macro's function": "{% macro f() %}{% endmacro %}{{ f._func }}{{ f._environment.filters }}",
    "a loop's insides": "{% for m in messages %}{{ loop._iterator }}{{ loop._recurse }}{% endfor %}{{ ''.__class__ }}",
    "changing a list": "{{ messages.append(1) }}",
    "changing a dict": "{{ messages[0].update({'role': 'x'}) }}",
    "a namespace's insides": "{% set ns = namespace(__class__=1) %}",
    "another template": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a parent": "{% extends '/etc/passwd' %}",
    "a type": "{{ namespace.mro() }}",
}


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    limits = TemplateLimits(seconds=SECONDS)
    return ChatRenderer(tiny_tokenizer(), limits=limits)


def refused(renderer: ChatRenderer, template: str) -> tuple[float, str]:
    """CPU time until the template is refused, and the reason."""
    start = time.thread_time()
    with pytest.raises(ValidationError) as caught:
        renderer.render_text(HELLO, chat_template=template)
    return time.thread_time() - start, str(caught.value)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("name", RUNAWAY)
def test_templates_that_run_on_are_stopped(renderer: ChatRenderer, name: str) -> None:
    seconds, _ = refused(renderer, RUNAWAY[name])
    assert seconds < SECONDS + 1  # plus compiling, and the last operation


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_templates_that_grow_are_stopped(renderer: ChatRenderer, name: str) -> None:
    before = peak_mb()
    seconds, _ = refused(renderer, EXPLOSIVE[name])
    assert seconds < SECONDS + 1
    assert peak_mb() - before < 300


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_outside_is_reached(renderer: ChatRenderer, name: str) -> None:
    """Hidden attributes are undefined: rendered as nothing, an error when used."""
    with contextlib.suppress(ValidationError):
        assert renderer.render_text(HELLO, chat_template=ESCAPES[name]) == ""


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ x | no_such_filter }}", "{{ (" * 3000, "{% if 1 %}" * 3000, "{{ " + "1+" * 30000 + "1 }}",
     "{{ " + "not " * 30000 + "1 }}", "{{ " + "[" * 500 + "]" * 500 + " }}", "{% if a %}" * 150 + "{% endif %}" * 150,
     "x" * (1 << 17)],
    ids=["syntax", "filter", "parentheses", "blocks", "sums", "nots", "lists", "ifs", "length"],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused(renderer: ChatRenderer, template: str) -> None:
    seconds, why = refused(renderer, template)
    assert seconds < 2 and len(why) < 700


SLOW_TO_COMPILE = {
    "comparisons": "{{ 1" + " < 1" * 60_000 + " }}",
    "joins": "{{ a" + " ~ a" * 60_000 + " }}",
    "items": "{{ [" + "1, " * 60_000 + "] }}",
    "pairs": "{{ {" + "1: 1, " * 40_000 + "} }}",
    "expressions": "{{ a }}" * 30_000,
    "assignments": "{% set a = 1 %}" * 15_000,
    "scopes": "{% for a in b %}" * 19 + "".join(f"{{% set v{i} = 1 %}}" for i in range(10_000)) + "{% endfor %}" * 19,
    "branches": "".join(f"{{% if a %}}{{% set v{i} = 1 %}}{{% endif %}}" for i in range(5_000)),
    "macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(6_000)),
    "arguments": "{{ f(" + ", ".join(f"a{i}=1" for i in range(20_000)) + ") }}",
    "calls": "{% call a() %}{% endcall %}" * 8_000,
}


@pytest.mark.parametrize("name", SLOW_TO_COMPILE)
def test_compiling_is_within_the_budget(name: str) -> None:
    limits = TemplateLimits(seconds=SECONDS)
    renderer = ChatRenderer(tiny_tokenizer(), limits=limits, request_limits=replace(limits, code=1 << 18))
    seconds, why = refused(renderer, SLOW_TO_COMPILE[name])
    assert seconds < SECONDS + 5  # the clock runs on while a neighbour shares the core
    assert any(text in why for text in ("ran longer than its", "program of more than", "named arguments"))


def test_compiling_and_rendering_of_a_requests_template_share_a_budget() -> None:
    limits = TemplateLimits(seconds=1.0, code=1 << 24)
    renderer = ChatRenderer(tiny_tokenizer(), limits=limits, request_limits=limits)
    long = "{% set a = 1 %}" * 10_000 + "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    seconds, _ = refused(renderer, long)
    assert seconds < 6
    own = ChatRenderer(tiny_tokenizer(), long, limits=limits)  # compiled once: the budget is the rendering's
    start = time.thread_time()
    with pytest.raises(ValidationError, match="ran longer"):
        own.render_text(HELLO)
    assert time.thread_time() - start > 1.0


def test_an_inline_template_without_a_brace_is_refused_by_name(tmp_path: Path) -> None:
    for text in ("x" * 5_000, "missing.jinja", "/" + "d/" * 3_000, "a" * 300):
        with pytest.raises(ValidationError, match="not the name of a file, and no template") as caught:
            ChatRenderer(tiny_tokenizer(), text)
        assert len(str(caught.value)) < 300
        with pytest.raises(ValidationError, match="no template"):
            ChatRenderer(tiny_tokenizer()).render_text(HELLO, chat_template=text)
    with pytest.raises(ValidationError, match="cannot be read|no template"):
        ChatRenderer(tiny_tokenizer(), "a\0b")
    (tmp_path / "latin").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(ValidationError, match="cannot be read"):
        ChatRenderer(tiny_tokenizer(), str(tmp_path / "latin"))
    (tmp_path / "good").write_text("{{ messages[0].content }}")
    assert ChatRenderer(tiny_tokenizer(), str(tmp_path / "good")).render_text(HELLO) == HELLO[0]["content"]


def test_an_escape_attempt_reads_as_nothing_or_fails() -> None:
    """Hidden attributes are undefined: false in a test, as in transformers."""
    text = ChatRenderer(tiny_tokenizer()).render_text(
        HELLO, chat_template="{{ 'hidden' if messages.__class__ is not defined else 'seen' }}"
    )
    assert text == "hidden"


def test_a_runaway_template_does_not_affect_other_threads(renderer: ChatRenderer) -> None:
    """Budgets are separate: a template over its limits costs no other rendering anything."""
    failures: list[str] = []

    def run_away() -> None:
        failures.append(refused(renderer, RUNAWAY["nested loops"])[1])

    threads = [threading.Thread(target=run_away) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert "hello" in renderer.render_text(HELLO)
    for thread in threads:
        thread.join()
    assert len(failures) == 2 and all("longer than its" in why for why in failures)


def test_a_conversation_that_is_too_long_is_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(ValidationError, match=r"hold 8500\d\d\d characters; at most 8388608"):
        renderer.render_text([{"role": "user", "content": "x" * 8_500_000}])


def test_a_long_conversation_is_within_limits(renderer: ChatRenderer) -> None:
    from tests.api.chat_templates import THINKING

    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 200} for i in range(1000)]
    slow = ChatRenderer(tiny_tokenizer(), THINKING)
    assert len(slow.render_text(messages)) > 1_000_000


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "return_tensors",
     "return_dict", "raise_exception", "strftime_now", "bos_token", "eos_token", "namespace", "range", "self", "loop",
     "__class__", "_x", "not a name", ""],
)  # fmt: skip
def test_template_variables_cannot_replace_reserved_ones(renderer: ChatRenderer, name: str) -> None:
    with pytest.raises(ValidationError, match="chat_template_kwargs"):
        renderer.render_text(HELLO, chat_template_kwargs={name: "x"})


def test_template_variables_are_data(renderer: ChatRenderer) -> None:
    show: Any = {"chat_template": "{{ x.y[0] }}{{ z }}"}
    assert renderer.render_text(HELLO, chat_template_kwargs={"x": {"y": [1]}, "z": None}, **show) == "1None"
    with pytest.raises(ValidationError, match="not JSON"):
        renderer.render_text(HELLO, chat_template_kwargs={"x": open}, **show)
    with pytest.raises(ValidationError, match="is an object"):
        renderer.render_text(HELLO, chat_template_kwargs=["x"], **show)  # type: ignore[arg-type]
