"""Jinja's code generator, with a payment written wherever plain Python would do work unseen."""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame


class PayingCodeGenerator(CodeGenerator):
    """Blocks, literals, slices, joins and comparisons go through the environment; operators and calls do anyway."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        node.iter = _paid(node.iter)
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
        pays = node.ctx == "load" and not all(isinstance(item, nodes.Const) for item in node.items)
        self.write("environment.made(" if pays else "")
        super().visit_Tuple(node, frame)
        self.write(")" if pays else "")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        node.expr = _paid(node.expr)
        for operand in node.ops:
            operand.expr = _paid(operand.expr)
        super().visit_Compare(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        pays = isinstance(node.arg, nodes.Slice)
        self.write("environment.made(" if pays else "")
        super().visit_Getitem(node, frame)
        self.write(")" if pays else "")

    def visit_MarkSafe(self, node: nodes.MarkSafe, frame: Frame) -> None:  # noqa: N802
        self.write("environment.read(")
        self.visit(node.expr, frame)
        self.write(")")


def _paid(node: nodes.Node) -> nodes.Expr:
    """The same, paid for when it is read. Jinja takes no new kinds of node, and no syntax makes a `MarkSafe`."""
    if isinstance(node, (nodes.Const, nodes.MarkSafe)):
        return node
    return nodes.MarkSafe(node, lineno=node.lineno)
