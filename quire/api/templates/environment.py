"""The sandbox that chat templates run in: transformers' names for them, with all work charged to a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import update_wrapper
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from markupsafe import Markup

from quire.api.templates.budget import OverBudgetError, budget
from quire.api.templates.builtins import (
    bounded_filters,
    bounded_tests,
    call_method,
    check_format_spec,
    check_printf,
    method_of,
)
from quire.api.templates.compiling import BudgetedCodeGenerator, Expectations, charged_tokens

_LONGEST_DATE = 32


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders as transformers does, within `budget()`.

    Only these can be called: macros, loops, blocks, the globals below, and the methods of strings and containers that
    `builtins` lists. So no single call can take much time or memory.
    """

    code_generator_class = BudgetedCodeGenerator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            optimized=False,  # constant folding would run without a budget
            finalize=_finalize,
        )
        self.filters = bounded_filters()
        self.tests = bounded_tests()  # type: ignore[assignment]
        self.globals = {
            "range": self.globals["range"],
            "dict": _Dict(),
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._callable = {id(value) for value in self.globals.values()}

    # Called by generated code

    def step(self) -> None:
        """A block starts."""
        budget().step()

    def read(self, value: Any) -> Any:
        """A value is looped over or compared."""
        return budget().read(value)

    def made(self, value: Any) -> Any:
        """A literal or a slice was made."""
        return budget().made(value)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Parts joined by `~`."""
        account = budget()
        account.room(sum(map(account.size, parts)))
        return "".join(map(str, parts))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The output of a macro or block."""
        pieces = list(pieces)
        budget().room(sum(map(len, pieces)))
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        account = budget()
        if operator == "+" and type(left) is str and type(right) is str:  # the most common case
            account.room(len(left) + len(right))
            return left + right
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            check_printf(left, right)
        elif operator == "+":
            account.read(left)
            account.read(right)
        return account.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        account = budget()
        account.step()
        for arg in args:
            account.read(arg)
        for name, arg in kwargs.items():
            if not name.startswith("_"):  # Jinja's own arguments, which change while the template runs
                account.read(arg)
        if isinstance(__obj, (Macro, LoopContext, BlockReference, Joiner, Undefined, _Format)):
            return __context.call(__obj, *args, **kwargs)
        if id(__obj) in __self._callable:
            return account.made(__context.call(__obj, *args, **kwargs))
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (LoopContext, Cycler, Joiner, GenerationTag)):
            return __context.call(__obj, *args, **kwargs)
        if isinstance(owner, _Dict):
            return account.made(__context.call(__obj, *args, **kwargs))
        method = method_of(__obj)
        if method is None:
            raise SecurityError(f"a chat template may not call {_name_of(__obj)}")
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        return call_method(*method, __obj, args, kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        return _Format(self, value)


class GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's text for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        """Every token of every template passes here on its way to the parser."""
        return charged_tokens(stream)

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's body, as a call that returns it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_whole"), [], [], body).set_lineno(line)

    def _whole(self, caller: Macro) -> str:
        return caller()


class _ChargedFields:
    """Each field of `str.format` has a bounded width and is charged for its text."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_format_spec(format_spec)
        budget().read(value)
        return budget().made(super().format_field(value, format_spec))  # type: ignore[misc]


class _Formatter(_ChargedFields, SandboxedFormatter):
    pass


class _EscapeFormatter(_ChargedFields, SandboxedEscapeFormatter):
    pass


class _Format:
    """`str.format` or `str.format_map` of one string."""

    def __init__(self, environment: TemplateEnvironment, method: Any) -> None:
        form = method.__self__
        escapes = isinstance(form, Markup)
        self._form = form
        self._formatter = _EscapeFormatter(environment, escape=form.escape) if escapes else _Formatter(environment)
        self._is_map = method.__name__ == "format_map"
        update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        budget().read(self._form)
        if self._is_map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            return self._write((), args[0])
        return self._write(args, kwargs)

    def _write(self, args: tuple[Any, ...], fields: Mapping[str, Any]) -> str:
        return budget().made(type(self._form)(self._formatter.vformat(self._form, args, fields)))


class _Dict:
    """The name `dict`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Holds what a template assigns inside its loops. Its content is never rendered: it may contain itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's, so that `self` can be a name
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _Namespace._check(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace takes no name with a leading underscore: {name[:50]!r}")


def _check_product(left: Any, right: Any) -> None:
    account = budget()
    for thing, times in ((left, right), (right, left)):
        if isinstance(times, int) and not isinstance(thing, (int, float)):
            account.room(account.size(thing) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        account.room(left.bit_length() + right.bit_length())


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        budget().size(1 << min(base.bit_length() * abs(exponent), 1 << 20))


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """The text of a rendered value; `pass_context` keeps Jinja from calling this at compile time."""
    account = budget()
    if type(value) is not str:
        value = str(account.read(value))
    account.room(len(value))
    return value


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    check_format_spec(form)
    budget().room(_LONGEST_DATE * len(form))
    return datetime.now().strftime(form)


def _name_of(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))[:100]


def compile_template(environment: TemplateEnvironment, source: str) -> tuple[jinja2.Template, Expectations]:
    """The compiled template, and how it treats messages."""
    tree = environment.parse(source)
    expects = Expectations.of(tree)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None)), expects


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Run it, charged to the current budget."""
    account = budget()
    given = account.size(list(variables.values()))
    if given > account.limits.characters:
        raise OverBudgetError(
            f"messages, tools and documents hold {given} characters; at most {account.limits.characters}"
        )
    context = template.new_context(dict(variables))
    length, pieces = 0, []
    for piece in template.root_render_func(context):
        length += len(piece)
        account.room(length, len(piece))
        pieces.append(piece)
    return "".join(pieces)
