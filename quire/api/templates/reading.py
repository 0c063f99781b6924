"""What a template expects of messages, read off its source."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import nodes


@dataclass(frozen=True)
class Expectations:
    """How a template treats the content of messages."""

    parts: bool
    """It loops over the parts of a content."""
    text: bool
    """It asks whether a content is text, or does not loop over it at all."""
    none: bool
    """It asks for what is none."""

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
    """Variables and macro arguments that stand for some message's content."""
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
