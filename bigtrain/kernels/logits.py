"""What a model's forward does with its logits, by its source: the chunked loss stands in for a factor and a soft cap, and for nothing else."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

# Settings with which a forward adds to the loss what it finds in the logits; the value that means "does not".
LOSS_CHANGES: dict[str, Any] = {"z_loss_coefficient": 0}
# Methods that give a scalar in fp32 back as it is.
_SAME = ("float", "contiguous", "to")
# What the loss is told by the caller, and not by the model.
_TOLD = ("shift_labels", "ignore_index", "num_items_in_batch")

_TEXT_CONFIG = "get_text_config()"
Path = tuple[str, ...]  # ("config", "logits_scaling"): where in a model a value is found


class Step(NamedTuple):
    """One operation of a forward on its logits.

    Attributes:
        how: "times", "over" or "tanh".
        by: where the factor or divisor is found; () for "tanh".
        unless_none: where a value is found without which it is not done; (): always done.
    """

    how: str
    by: Path = ()
    unless_none: Path = ()


class Change(NamedTuple):
    """The loss is of scale * logits; with a cap, of cap * tanh(scale * logits / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def of(self, value: float) -> float:
        scaled = self.scale * value
        return scaled if self.cap is None else self.cap * math.tanh(scaled / self.cap)

    def __str__(self) -> str:
        parts = [] if self.scale == 1 else [f"times {self.scale:g}"]
        return ", ".join(parts if self.cap is None else [*parts, f"capped at {self.cap:g}"])


class Use(NamedTuple):
    """What a forward does with its logits before the loss: `steps`, or what they do not cover: the line in question, or None."""

    steps: tuple[Step, ...]
    strange: str | None = None


def loss_changed_by(config: Any) -> str | None:
    """The setting by which a model of this config adds to its loss what it finds in the logits, with its value, or None."""
    text = getattr(config, "get_text_config", None)
    for one in (config, text() if text is not None else config):
        for key, neutral in LOSS_CHANGES.items():
            value = getattr(one, key, neutral)
            if value != neutral and value is not None:
                return f"{key} = {value}"
    return None


def change_by(steps: tuple[Step, ...], model: Any) -> Change:
    """What the steps come to with the model's values of now.

    Raises:
        ValueError: a value is no finite number other than 0, or there are two caps.
    """
    times, over, cap = 1.0, 1.0, None
    for step in steps:
        if step.unless_none and _value(model, step.unless_none) is None:
            continue
        if step.how == "tanh":
            if cap is not None:
                raise ValueError("two soft caps")
            cap = 1.0
            continue
        by = _value(model, step.by)
        if isinstance(by, bool) or not isinstance(by, int | float) or not math.isfinite(by) or by == 0:
            raise ValueError(f"{step.by[-1]} = {by if isinstance(by, int | float | str | None) else type(by).__name__}")
        if cap is not None:
            cap = cap * by if step.how == "times" else cap / by
        elif step.how == "times":
            times *= by
        else:
            over *= by
    if cap is None:
        return Change(times / over)
    return Change(times * cap / over, abs(cap))  # cap * tanh(times / over * x), by its slope at 0


def _value(model: Any, path: Path) -> Any:
    for name in path:
        model = model.get_text_config() if name == _TEXT_CONFIG else getattr(model, name, None)
    return model


def use_of(source: str) -> Use:
    """What a forward does with logits or labels beside handing both to `self.loss_function` and returning the logits.

    What happens under an `if` that asks for one of `LOSS_CHANGES` is left to `loss_changed_by`.

    Args:
        source: of the method.

    Raises:
        SyntaxError: it is no source of a method.
    """
    lines = "class _:\n" + source if source[:1].isspace() else source
    reader = _Reader(ast.parse(lines))
    node = reader.strange()
    steps = tuple(step for _, some in sorted(reader.changes.items()) for step in some)
    return Use(steps, None if node is None else lines.splitlines()[node.lineno - 1].strip())


class _Reader:
    """changes: steps by the line of their statement."""

    def __init__(self, tree: ast.AST):
        self.tree = tree
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.names: set[str] = set()
        self.changes: dict[int, list[Step]] = {}

    def strange(self) -> Any:
        """The first node that does what is not covered, or None."""
        nodes = list(_looked_at(self.tree))
        heads = [node for node in nodes if _is_call_of(node, "lm_head")]
        losses = [node for node in nodes if _is_call_of(node, "loss_function")]
        for call in heads:
            assign = self._statement(call)
            if not isinstance(assign, ast.Assign) or not isinstance(assign.targets[0], ast.Name) or not self._takes(assign):
                return call
            self.names.add(assign.targets[0].id)
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in self.names and not self._harmless(node):
                assign = self._statement(node)
                if not (isinstance(assign, ast.Assign) and self._unfolded(assign.value) and self._takes(assign)):
                    return node
            if node in losses and not _usual_loss(node):
                return node
            if isinstance(node, ast.Name) and node.id == "labels" and isinstance(node.ctx, ast.Store):
                assign = self.parents[node]
                if not isinstance(assign, ast.Assign) or _inner(assign.value) != "labels":
                    return node
        # Steps are counted in the order of their lines, which is that of one head, one name and one loss.
        if self.changes and not (len(heads) == len(self.names) == len(losses) == 1):
            return heads[0]
        return next((node for node in losses if self.changes and node.lineno < max(self.changes)), None)

    def _takes(self, assign: ast.Assign) -> bool:
        """Whether a statement changes the logits by known steps, which are then noted, or not at all."""
        steps = self._unfolded(assign.value)
        if steps is None or not steps:
            return steps is not None
        target, around = assign.targets[0], self.parents[assign]
        needs: Path | None = ()
        if isinstance(around, ast.If) and assign in around.body:
            needs, around = self._asked_for(around.test), self.parents[around]
        known = isinstance(target, ast.Name) and (not self.names or target.id in self.names)
        if needs is None or not known or not isinstance(around, ast.FunctionDef):
            return False
        self.changes[assign.lineno] = [step._replace(unless_none=needs) for step in steps]
        return True

    def _unfolded(self, value: ast.AST) -> list[Step] | None:
        """The steps from the head's answer, or from what the logits were before, to this expression."""
        if _is_call_of(value, "lm_head") or (isinstance(value, ast.Name) and value.id in self.names):
            return []
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            how = "times" if isinstance(value.op, ast.Mult) else "over"
            before, by = self._unfolded(value.left), self._path(value.right)
            return None if before is None or not by else [*before, Step(how, by)]
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return None
        if value.func.attr in _SAME:
            return self._unfolded(value.func.value)
        if value.func.attr != "tanh" or len(value.args) != 1 or value.keywords:
            return None
        before = self._unfolded(value.args[0])
        return None if before is None else [*before, Step("tanh")]

    def _path(self, value: ast.AST) -> Path | None:
        """Where in the model this is found: attributes of self, or a name that was given once, to such."""
        match value:
            case ast.Name("self"):
                return ()
            case ast.Name(name):
                named = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == name]
                given = [self.parents[node] for node in named if isinstance(node.ctx, ast.Store)]
                known = len(given) == 1 and isinstance(given[0], ast.Assign | ast.NamedExpr) and self._always(given[0])
                return self._path(given[0].value) if known else None  # type: ignore[attr-defined]
            case ast.NamedExpr(_, inner):
                return self._path(inner)
            case ast.Attribute(inner, name):
                return self._under(inner, name)
            case ast.Call(ast.Attribute(inner, "get_text_config"), [], []):
                return self._under(inner, _TEXT_CONFIG)
            case ast.Call(ast.Name("getattr"), [inner, ast.Constant(str(name)), ast.Constant(None)], []):
                return self._under(inner, name)
        return None

    def _under(self, value: ast.AST, name: str) -> Path | None:
        path = self._path(value)
        return None if path is None else (*path, name)

    def _always(self, given: ast.AST) -> bool:
        """A value is given to a name whatever happens: in the method's own lines, or first thing in the test of an `if` there."""
        line = self._statement(given)
        first = line is given or (isinstance(line, ast.If) and isinstance(line.test, ast.Compare) and line.test.left is given)
        return first and isinstance(self.parents[line], ast.FunctionDef)

    def _asked_for(self, test: ast.AST) -> Path | None:
        """X of `X is not None`."""
        match test:
            case ast.Compare(asked, [ast.IsNot()], [ast.Constant(None)]):
                return self._path(asked)
        return None

    def _statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def _outermost(self, node: ast.AST) -> ast.AST:
        """The expression around a value that still is that value: `x.float()` of x."""
        while True:
            attribute = self.parents[node]
            call = self.parents[attribute]
            if not (isinstance(attribute, ast.Attribute) and attribute.attr in _SAME and isinstance(call, ast.Call)):
                return node
            node = call

    def _harmless(self, name: ast.Name) -> bool:
        """Handed to the loss, returned, asked for its device or dtype, or given its own name again."""
        if not isinstance(name.ctx, ast.Load):
            return not isinstance(self.parents[name], ast.AugAssign)
        node = self._outermost(name)
        around = self.parents[node]
        if isinstance(around, ast.Attribute) and around.attr in ("device", "dtype"):
            return True
        if isinstance(around, ast.keyword):
            return around.arg == "logits"
        if isinstance(around, ast.Assign):
            target = around.targets[0]
            return isinstance(target, ast.Name) and target.id == name.id
        return isinstance(around, ast.Tuple) or _is_call_of(around, "loss_function")


def _looked_at(tree: ast.AST) -> Iterator[Any]:
    """All nodes but those under an `if` whose test names one of the known settings."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and any(key in ast.unparse(child.test) for key in LOSS_CHANGES)):
            yield from _looked_at(child)


def _is_call_of(node: Any, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}"


def _inner(value: ast.AST) -> str | None:
    """The name whose value this expression is."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _SAME:
        value = value.func.value
    return value.id if isinstance(value, ast.Name) else None


def _usual_loss(call: ast.Call) -> bool:
    given = {word.arg: word.value for word in call.keywords}
    labels = given.get("labels", call.args[1] if len(call.args) > 1 else None)
    return labels is not None and _inner(labels) == "labels" and not any(word in given for word in _TOLD)
