"""What backward through a sparse block's experts holds, tensor by tensor: of transformers' own, and of bigtrain's (kernels/experts.py).

transformers/integrations/moe.py `grouped_mm_experts_forward` (5.17 and 5.24): tokens are gathered once for each of their experts, sorted
by expert; two grouped products; each token's results are weighed, sorted back and summed up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from bigtrain.plan.activations import BlockBytes
from bigtrain.plan.parameters import Parameter
from bigtrain.plan.tape import Tape

_ROW = "backward, feed-forward gradients"


def keys(block: int) -> tuple[Hashable, Hashable]:
    """Of what is kept of the gathered tokens and of the experts' results; each is `BlockBytes.chosen` bytes."""
    return ("of experts", "inputs", block), ("of experts", "results", block)


def before_backward(tape: Tape, cost: BlockBytes) -> None:
    """The gradient of the sum over a token's experts, one for each: made before anything of the block is asked for, or recomputed."""
    tape.hold("dchosen", cost.chosen, _ROW)


def backward(
    tape: Tape, items: Sequence[Parameter], block: int, cost: BlockBytes, feed: Sequence[int], grad: Callable[[int], None]
) -> None:
    """From the block's end on, after `before_backward`.

    Args:
        items: of the model. feed: indices of the block's feed-forward parameters, in its order.
        grad: autograd delivers the gradient of a parameter.
    """
    if cost.in_passing:
        _fused_backward(tape, items, block, cost, feed, grad)
        return
    inputs, results = keys(block)
    grouped = [i for i in feed if ".experts." in items[i].name]
    # Sorted by expert again: zeros, and a copy with the gradients written into it.
    tape.hold("zeros", cost.chosen, _ROW)
    tape.hold("dsorted", cost.chosen, _ROW)
    tape.drop("zeros", "dchosen")
    tape.hold("dresults", cost.chosen, _ROW)
    tape.touch(cost.chosen, _ROW)  # for the gradient of the routing weights
    tape.drop("dsorted", results)
    for i in grouped[-1:]:
        grad(i)
    tape.hold("dproduct", cost.feed, _ROW)
    tape.drop("dresults", ("product", block))
    tape.hold("dmiddle", 2 * cost.feed, _ROW)
    tape.drop("dproduct", ("middle", block))
    tape.hold("dgate", cost.feed, _ROW)
    tape.drop(("gate", block))
    tape.hold("dboth", 2 * cost.feed, _ROW)  # one tensor, as gate and up are halves of one product
    tape.drop("dmiddle", "dgate")
    for i in reversed(grouped[:-1]):
        grad(i)
    tape.hold("dinputs", cost.chosen, _ROW)
    tape.drop("dboth", inputs)
    tape.touch(2 * cost.stream, _ROW)
    tape.drop("dinputs", ("routing", block))
    tape.hold("dinput", cost.stream, _ROW)
    for i in reversed([i for i in feed if i not in grouped]):
        grad(i)
    tape.drop("dinput")


def _fused_backward(
    tape: Tape, items: Sequence[Parameter], block: int, cost: BlockBytes, feed: Sequence[int], grad: Callable[[int], None]
) -> None:
    """`_Second.backward` and then `_First.backward`: each makes one weight's gradient, which autograd hands on at once."""
    grouped = [i for i in feed if ".experts." in items[i].name]
    last = [i for i in grouped if "down" in items[i].name]
    one = cost.feed - cost.shared

    def made(which: Sequence[int]) -> None:
        for i in which:
            tape.hold(("of experts", "gradient", i), 2 * items[i].elems, _ROW)

    def handed_on(which: Sequence[int]) -> None:
        for i in which:
            tape.drop(("of experts", "gradient", i))
            grad(i)

    if cost.shared:  # their gate and up become their own gradients
        tape.touch(cost.shared + 2 * cost.stream, _ROW)
        tape.drop(("product", block))
    tape.hold("dresults", cost.in_passing, _ROW)
    tape.hold("dthrough", one, _ROW)
    tape.hold("through", one, _ROW)
    made(last)
    tape.drop("through", "dresults")
    tape.hold("dboth", 2 * one, _ROW)
    tape.drop("dthrough", ("middle", block), ("gate", block), ("product", block))
    handed_on(last)
    tape.hold("dinputs", cost.in_passing, _ROW)
    tape.hold("dinput", cost.stream, _ROW)
    tape.drop("dinputs")
    tape.hold("inputs", cost.in_passing, _ROW)
    first = [i for i in grouped if i not in last]
    made(first)
    tape.drop("inputs", "dboth")
    handed_on(first)
    tape.drop(("routing", block))
    for i in reversed([i for i in feed if i not in grouped]):
        grad(i)
    tape.drop("dinput")
