"""Compiling a chat template: generated code charges its work to the budget; how it treats messages is read off it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.lexer import Token, TokenStream

from quire.api.templates.budget import OverBudgetError, budget

MAX_KEYWORDS = 256
_NODE_WORK = 64
"""What a token or a node costs, in the budget's unit: copying a character."""


def charged_tokens(stream: TokenStream) -> Iterator[Token]:
    """The same tokens; each is charged, with what parsing it takes."""
    account = budget()
    for token in stream:
        account.spend(_NODE_WORK)
        yield token


class BudgetedCodeGenerator(CodeGenerator):
    """Routes blocks, literals, slices, joins and comparisons through the environment, which charges for them; operators
    and calls go through it anyway. Generating code is charged itself."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        budget().spend(_NODE_WORK)
        return super().visit(node, *args, **kwargs)

    def write(self, x: str) -> None:
        account = budget()
        account.spend(len(x))
        account.check_code(self.stream.tell())
        super().write(x)

    def enter_frame(self, frame: Frame) -> None:
        # Jinja copies the names of outer scopes into each inner one, and writes out what it assigns.
        symbols = frame.symbols
        budget().spend(_NODE_WORK * (len(symbols.refs) + len(symbols.loads) + len(symbols.stores)))
        super().enter_frame(frame)

    def signature(self, node: Any, frame: Frame, extra_kwargs: Mapping[str, Any] | None = None) -> None:
        if len(node.kwargs) > MAX_KEYWORDS:  # Python compares each with each
            raise OverBudgetError(f"a call has {len(node.kwargs)} named arguments; at most {MAX_KEYWORDS}")
        super().signature(node, frame, extra_kwargs)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        node.iter = _charged(node.iter)
        super().visit_For(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        charges = node.ctx == "load" and not all(isinstance(item, nodes.Const) for item in node.items)
        self.write("environment.made(" if charges else "")
        super().visit_Tuple(node, frame)
        self.write(")" if charges else "")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        node.expr = _charged(node.expr)
        for operand in node.ops:
            operand.expr = _charged(operand.expr)
        super().visit_Compare(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        charges = isinstance(node.arg, nodes.Slice)
        self.write("environment.made(" if charges else "")
        super().visit_Getitem(node, frame)
        self.write(")" if charges else "")

    def visit_MarkSafe(self, node: nodes.MarkSafe, frame: Frame) -> None:  # noqa: N802
        self.write("environment.read(")
        self.visit(node.expr, frame)
        self.write(")")


def _charged(node: nodes.Node) -> nodes.Expr:
    """The same, charged when it is read. Jinja accepts no new node types, and no template syntax makes a `MarkSafe`."""
    if isinstance(node, (nodes.Const, nodes.MarkSafe)):
        return node
    return nodes.MarkSafe(node, lineno=node.lineno)


@dataclass(frozen=True)
class Expectations:
    """How a template treats the content of messages, read from its source."""

    parts: bool
    """It loops over the parts of a content."""
    text: bool
    """It tests whether a content is text, or does not loop over it at all."""
    none: bool
    """It tests for None."""

    @classmethod
    def of(cls, tree: nodes.Template) -> Expectations:
        """Those of a parsed template."""
        aliases = _names_of_content(tree)
        parts = any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))
        tests = {test.name for test in tree.find_all(nodes.Test)}
        none = "none" in tests or any(
            isinstance(const, nodes.Const) and const.value is None
            for compare in tree.find_all(nodes.Compare)
            for const in (compare.expr, *(operand.expr for operand in compare.ops))
        )
        return cls(parts=parts, text=not parts or "string" in tests, none=none)


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables and macro arguments that hold some message's content."""
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return names


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
