"""Methods of strings and containers that templates may call, and filters: all with bounded results."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.filters import make_attrgetter, sync_do_sum
from jinja2.utils import _PassArg, pass_environment

from quire.api.templates.budget import OverBudgetError, budget, metered

_STR_METHODS = frozenset(
    {
        "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "format_map", "index",
        "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
        "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix",
        "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines",
        "startswith", "strip", "swapcase", "title", "upper", "zfill",
    }
)  # fmt: skip
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset({"get", "items", "keys", "values", "copy"})),
    (list, frozenset({"index", "count", "copy"})),
    (tuple, frozenset({"index", "count"})),
    (float, frozenset({"is_integer"})),
)
_UNBOUNDED_FILTERS = frozenset({"pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr"})
"""For HTML and debugging: slower than linear in their input, and of no use for prompts."""
_CHOOSING_FILTERS = frozenset({"attr", "d", "default", "first", "last", "max", "min", "random"})
"""These return an existing value."""
_LISTING_FILTERS = frozenset({"groupby", "join", "list", "slice", "sort", "title", "unique", "wordcount"})
"""These make one object per character or word of a text."""
_OBJECT = 8
"""Cost of an object besides its characters."""
_MAX_SEARCH = 1 << 30
_MAX_WIDTH = 1 << 12
_MAX_GROUPS = 100_000
_PRINTF = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*")
_PRINTF_KEY = re.compile(r"\([^)]*\)")
_NUMBER = re.compile(r"\d+|\*")
_LONGEST_NUMBER = 320


def method_of(callee: Any) -> tuple[Any, str] | None:
    """The value and the method's name, if this is a method of a built-in type that templates may call."""
    owner, name = getattr(callee, "__self__", None), getattr(callee, "__name__", "")
    for kind, names in _METHODS:
        if isinstance(owner, kind):
            return (owner, name) if name in names else None
    return None


def call_method(owner: Any, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call one of them, after checking that its result is within the limits."""
    if isinstance(owner, str):
        args = _check_str_method(owner, name, args, kwargs)
    else:
        budget().read(owner)
    result = method(*args, **kwargs)
    return result if name == "get" else budget().made(result)


def _check_str_method(text: str, name: str, args: Any, kwargs: Any) -> Any:
    account = budget()
    account.read(text)
    strings = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
    for arg in strings:
        _check_search(text, arg)
    if name in ("center", "ljust", "rjust", "zfill") and args:
        _check_width(args[0])
    elif name == "expandtabs":
        account.room(len(text) + text.count("\t") * _check_width(args[0] if args else kwargs.get("tabsize", 8)))
    elif name == "replace" and len(args) >= 2:
        _check_replace(text, *args[:2])
    elif name == "join" and args:
        items = _listed(args[0])
        account.room(account.size(items) + len(text) * len(items))
        args = (items, *args[1:])
    elif name in ("split", "rsplit", "splitlines"):
        separator = strings[0] if strings and name != "splitlines" else ""
        account.room(_OBJECT * (text.count(separator) if separator else len(text) // 2))
    return args


def _check_search(text: str, pattern: str) -> None:
    if len(text) * len(pattern) > _MAX_SEARCH and len(pattern) > 1:
        raise OverBudgetError(f"the chat template searches {len(pattern)} characters in {len(text)}: too slow")


def _check_width(width: Any) -> int:
    if not isinstance(width, int):
        return 0  # the call itself raises the right error
    budget().room(abs(width))
    return abs(width)


def _check_replace(text: str, old: Any, new: Any, *_: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget().room(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def check_printf(form: str, values: Any) -> None:
    """Check before `form % values`."""
    account = budget()
    each = account.size(values) + _LONGEST_NUMBER
    fields = [check_format_spec(_PRINTF_KEY.sub("", field)) + each for field in _PRINTF.findall(form)]
    account.room(len(form) + sum(fields))


def check_format_spec(spec: str) -> int:
    """Check the width and precision of a format; returns the most characters they add."""
    total = 0
    for number in _NUMBER.findall(spec):
        if number == "*" or len(number) > 4 or int(number) > _MAX_WIDTH:
            raise OverBudgetError(f"the chat template formats a value {number[:20]} wide; at most {_MAX_WIDTH}")
        total += int(number)
    return total


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` of chat templates: plain JSON, with nothing escaped for HTML."""
    account = budget()
    account.read(value)
    for part in (*(separators or ()), indent):
        if isinstance(part, str) and len(part) > _MAX_WIDTH:
            raise OverBudgetError(f"the chat template writes JSON with {len(part)} characters between its values")
    if separators is not None:
        account.room(account.size(value) * max(map(len, separators), default=0))
    if indent is None:
        text = json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        account.room(len(text))
        return text
    _check_width(indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces = []
    for piece in encoder.iterencode(value):
        account.room(len(piece))
        pieces.append(piece)
    account.room(sum(map(len, pieces)))
    return "".join(pieces)


def _check_center(value: Any, width: Any = 80) -> None:
    _check_width(width)


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    each = len(width) if isinstance(width, str) else _check_width(width)
    lines = str(text).count("\n") + str(text).count("\r") + 1
    budget().room(budget().size(text) + each * lines)


def _check_groups(value: Any, count: Any, *_: Any, **__: Any) -> None:
    if isinstance(count, int) and count > _MAX_GROUPS:
        raise OverBudgetError(f"the chat template cuts a list into {count}; at most {_MAX_GROUPS}")


def _check_format(form: Any, *args: Any, **kwargs: Any) -> None:
    check_printf(str(form), kwargs or args)


def _check_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(precision, int) and abs(precision) > 300:
        raise OverBudgetError(f"the chat template rounds to {precision} digits; at most 300")


def _check_trim(text: Any, chars: Any = None) -> None:
    if isinstance(text, str) and isinstance(chars, str):
        _check_search(text, chars)


def _check_replace_filter(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _check_search(text, old)
    _check_replace(text, old, new)


_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_groups,
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "replace": _check_replace_filter,
    "round": _check_round,
    "slice": _check_groups,
    "trim": _check_trim,
}


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters, each charged for what it reads and makes."""
    filters = {
        name: _bounded(function, _CHECKS.get(name), makes=name not in _CHOOSING_FILTERS, cuts=name in _LISTING_FILTERS)
        for name, function in DEFAULT_FILTERS.items()
        if name not in _UNBOUNDED_FILTERS
    }
    filters["join"] = _bounded(DEFAULT_FILTERS["join"], _check_join, listed=True, cuts=True)
    filters["sum"] = _bounded(_sum, listed=True)
    filters["tojson"] = to_json
    return filters


def bounded_tests() -> dict[str, Callable[..., Any]]:
    """Jinja's tests; comparisons are charged."""
    compares = {"in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">",
                "ge", ">="}  # fmt: skip
    tests: dict[str, Callable[..., Any]] = dict(DEFAULT_TESTS)  # type: ignore[arg-type]
    return {name: _reading(test) if name in compares else test for name, test in tests.items()}


def _reading(test: Callable[..., Any]) -> Callable[..., Any]:
    def compared(*args: Any) -> Any:
        for arg in args:
            budget().read(arg)
        return test(*args)

    return functools.wraps(test)(compared)


def _bounded(
    function: Callable[..., Any],
    check: Callable[..., None] | None = None,
    *,
    listed: bool = False,
    makes: bool = True,
    cuts: bool = False,
) -> Callable[..., Any]:
    at = 0 if _PassArg.from_obj(function) is None else 1

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        account = budget()
        account.step()
        if listed:
            args = (*args[:at], _listed(args[at]), *args[at + 1 :])
        if cuts and isinstance(args[at], str):
            account.room(_OBJECT * len(args[at]))
        for arg in args[at:]:
            account.read(arg)
        for arg in kwargs.values():
            account.read(arg)
        if check is not None:
            check(*args[at:], **kwargs)
        result = function(*args, **kwargs)
        if hasattr(result, "__next__"):
            return metered(result)
        return account.made(result) if makes else result

    return bounded


def _check_join(items: Any, d: Any = "", attribute: Any = None) -> None:
    account = budget()
    account.room(account.size(items) + len(str(d)) * (len(items) if hasattr(items, "__len__") else 0))


@pass_environment
def _sum(environment: Any, items: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, list):
        return sync_do_sum(environment, items, attribute, start)
    lists = items if attribute is None else list(map(make_attrgetter(environment, attribute), items))
    budget().made(lists)
    return [*start, *itertools.chain.from_iterable(lists)]  # as adding them, without copying the sum for each


def _listed(items: Iterable[Any] | Any) -> Any:
    """An iterator as a list, so that it can be measured before it is used."""
    return list(items) if hasattr(items, "__next__") else items
