"""What jinja2 compiles to bare Python — loops, `~`, comparisons, slices — rewritten so that it is charged as well."""

from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

STATEMENTS = (
    nodes.Assign,
    nodes.AssignBlock,
    nodes.Break,
    nodes.CallBlock,
    nodes.Continue,
    nodes.FilterBlock,
    nodes.For,
    nodes.If,
    nodes.Macro,
    nodes.Output,
    nodes.Scope,
    nodes.With,
)

# The filters that the rewriting puts in. A template cannot spell them, for the blank.
SPEND, WEIGH, MEMBER, CONCAT, MADE, SPREAD = " spend", " weigh", " member", " concat", " made", " spread"

MOST_NAMES_TIMES_BRANCHES = 400_000


def metered(template: nodes.Template) -> nodes.Node:
    """`template` with a charge for its nodes at the start of each block, and each operator's operands reported.

    Raises TemplateSyntaxError for tags that no chat template needs (inheritance, imports, autoescape), and for so many
    variables and branches that jinja2's compiler, which copies its table of names at each branch, would take seconds.
    """
    names = {name.name for name in template.find_all(nodes.Name) if name.ctx == "store"}
    branches = sum(1 for _ in template.find_all((nodes.If, nodes.For)))
    if len(names) * branches > MOST_NAMES_TIMES_BRANCHES:
        raise TemplateSyntaxError(f"{len(names)} variables and {branches} branches are too many", 1)
    return _Metering().visit(template)


class _Metering(NodeTransformer):
    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.Stmt) and not isinstance(node, STATEMENTS):
            tag = "autoescape" if isinstance(node, nodes.ScopedEvalContextModifier) else type(node).__name__.lower()
            raise TemplateSyntaxError(f"a chat template may not use the tag {tag!r}", node.lineno)
        node = super().generic_visit(node, *args, **kwargs)
        for field in ("body", "else_"):
            statements = getattr(node, field, None) or []
            if statements or (field == "body" and isinstance(node, nodes.For)):
                defaults = getattr(node, "defaults", []) if field == "body" else []
                charge = _charge([*defaults, *statements], node.lineno)
                setattr(node, field, [nodes.ExprStmt(charge, lineno=node.lineno), *statements])
        return node

    def visit_Template(self, node: nodes.Template) -> nodes.Node:
        # What stands outside of all blocks is evaluated once.
        return NodeTransformer.generic_visit(self, node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_charge([node.test], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(CONCAT, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through(WEIGH, node.expr)
        for operand in node.ops:
            operand.expr = _through(MEMBER if operand.op in ("in", "notin") else WEIGH, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _through(WEIGH, node.key)
        return node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise TemplateSyntaxError(f"a namespace has no attribute {node.attr!r}", node.lineno)
        return node

    def visit_Call(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        return _spread(self.generic_visit(node))

    visit_Filter = visit_Test = visit_Call


def _through(name: str, value: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _spread(node: Any) -> Any:
    if node.dyn_args is not None:
        node.dyn_args = _through(SPREAD, node.dyn_args)
    return node


def _charge(parts: list[nodes.Node], line: int) -> nodes.Expr:
    """An expression that charges for evaluating `parts` once, without the blocks in them: those charge themselves."""
    steps, characters = 2, 0
    pending = list(parts)
    while pending:
        node = pending.pop()
        steps += 1
        if isinstance(node, nodes.TemplateData):
            characters += len(node.data)
        inner = {id(part) for field in ("body", "else_") for part in getattr(node, field, None) or ()}
        pending.extend(child for child in node.iter_child_nodes() if id(child) not in inner)
    return nodes.Filter(nodes.Const(steps), SPEND, [nodes.Const(characters)], [], None, None, lineno=line)
