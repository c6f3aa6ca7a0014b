"""What a model's forward does with its logits, by its source: the chunked loss may stand in for them only if that is nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

# Settings with which a model changes its logits before the loss, or the loss by them; the value that means "does not".
LOGIT_CHANGES: dict[str, Any] = {
    "final_logit_softcapping": None,
    "logits_scaling": 1,
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "logits_mup_width_multiplier": 1,
    "z_loss_coefficient": 0,
}
# Methods that give a scalar in fp32 back as it is.
_SAME = ("float", "contiguous", "to")
# What the loss is told by the caller, and not by the model.
_TOLD = ("shift_labels", "ignore_index", "num_items_in_batch")


def changed_by(config: Any) -> str | None:
    """The setting by which a model of this config changes its logits, with its value, or None."""
    text = getattr(config, "get_text_config", None)
    for one in (config, text() if text is not None else config):
        for key, neutral in LOGIT_CHANGES.items():
            value = getattr(one, key, neutral)
            if value != neutral and value is not None:
                return f"{key} = {value}"
    return None


def strange_use(source: str) -> str | None:
    """What a forward does with logits or labels beside handing both to `self.loss_function` and returning the logits.

    What happens under an `if` that asks for one of `LOGIT_CHANGES` is left to `changed_by`.

    Args:
        source: of the method.

    Returns:
        The line in question, or None.

    Raises:
        SyntaxError: it is no source of a method.
    """
    lines = "class _:\n" + source if source[:1].isspace() else source
    tree = ast.parse(lines)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    names: set[str] = set()
    for call in (node for node in _looked_at(tree) if _is_call_of(node, "lm_head")):
        assign = parents[_outermost(call, parents)]
        if not isinstance(assign, ast.Assign) or not isinstance(assign.targets[0], ast.Name):
            return _line(lines, call)
        names.add(assign.targets[0].id)
    for node in _looked_at(tree):
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load) and not _harmless(node, parents):
            return _line(lines, node)
        if _is_call_of(node, "loss_function") and not _usual_loss(node):
            return _line(lines, node)
        if isinstance(node, ast.Name) and node.id == "labels" and isinstance(node.ctx, ast.Store):
            assign = parents[node]
            if not isinstance(assign, ast.Assign) or _inner(assign.value) != "labels":
                return _line(lines, node)
    return None


def _looked_at(tree: ast.AST) -> Iterator[Any]:
    """All nodes but those under an `if` whose test names one of the known settings."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and any(key in ast.unparse(child.test) for key in LOGIT_CHANGES)):
            yield from _looked_at(child)


def _is_call_of(node: Any, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}"


def _outermost(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """The expression around a value that still is that value: `x.float()` of x."""
    while True:
        attribute = parents[node]
        call = parents[attribute]
        if not (isinstance(attribute, ast.Attribute) and attribute.attr in _SAME and isinstance(call, ast.Call)):
            return node
        node = call


def _inner(value: ast.AST) -> str | None:
    """The name whose value this expression is."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _SAME:
        value = value.func.value
    return value.id if isinstance(value, ast.Name) else None


def _harmless(name: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Handed to the loss, returned, asked for its device or dtype, or given its own name again."""
    node = _outermost(name, parents)
    around = parents[node]
    if isinstance(around, ast.Attribute) and around.attr in ("device", "dtype"):
        return True
    if isinstance(around, ast.keyword):
        return around.arg == "logits"
    if isinstance(around, ast.Assign):
        target = around.targets[0]
        return isinstance(target, ast.Name) and target.id == name.id
    return isinstance(around, ast.Tuple) or _is_call_of(around, "loss_function")


def _usual_loss(call: ast.Call) -> bool:
    given = {word.arg: word.value for word in call.keywords}
    labels = given.get("labels", call.args[1] if len(call.args) > 1 else None)
    return labels is not None and _inner(labels) == "labels" and not any(word in given for word in _TOLD)


def _line(lines: str, node: Any) -> str:
    return lines.splitlines()[node.lineno - 1].strip()
