"""Ranks that take different branches of a model at ZeRO stage 3, noticed before the gather that would hang.

At stage 3 a module's parameters are gathered by all ranks together. If ranks take different branches, NCCL waits for ever and
gloo aborts. On the CPU the ranks compare module by module before each gather. On GPUs, where that would cost time, it is the
watch (`bigtrain.watch`) that notices, and names the module each rank is in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from bigtrain import meeting, ranks, watch, zero
from bigtrain.errors import RanksDisagreeError
from bigtrain.whereabouts import HERE

REMEDY = (
    "At stage 3 every rank must run the same modules: run the branch on every rank and multiply its result by zero where it is "
    "not wanted, or pass leaf_modules=(the class of the module that contains the branch,) to the Engine, if that is given hidden states (a whole "
    "model, which is given token ids, cannot be one), or use stage 2. "
    "A tower for images or sound runs only where a batch has some: give every rank one (a blank one, its tokens masked), or use stage 2."
)


class Branches:
    """The forward passes of one engine, with hooks on the model and every module whose parameters ZeRO-3 must gather: each compares first.

    Args:
        model: the module.
        stage: of ZeRO.
        uniform: nothing needs comparing: the ranks were promised to take one way.
        step: gives the current step number.
    """

    def __init__(self, model: torch.nn.Module, stage: int, uniform: bool, step: Callable[[], int]):
        self._on = False
        self._stage, self._step = stage, step
        self._names = [name or type(model).__name__ for name, _ in model.named_modules()]
        compared = stage == 3 and not uniform and ranks.device().type == "cpu"
        self._handles = [
            module.register_forward_pre_hook(self._entering(i), prepend=True)
            for i, module in enumerate(model.modules() if compared else ())
            if i == 0
            or any(_gathered_at(module, p) for p in module.parameters())  # at the outermost one DeepSpeed fetches ahead
        ]

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """One forward through the engine; between these modules may be called at will, and nothing is compared."""
        if self._stage < 3:
            HERE.at("the forward pass")
            yield
            HERE.at("after a forward pass")
            return
        with HERE.together("the forward pass"):
            self._on = True
            try:
                yield
            finally:
                self._on = False

    def release(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _entering(self, index: int) -> Callable[..., None]:
        def compare(*_: object) -> None:
            if self._on:
                self._compare(index)

        return compare

    def _compare(self, index: int) -> None:
        try:
            told = meeting.meet(meeting.Point.FORWARD, self._step(), 0, (index,))
        except RanksDisagreeError as error:
            if watch.lost():
                raise
            raise RanksDisagreeError(f"{error}\nThis rank was about to enter module {self._names[index]}. {REMEDY}") from error
        names = {r: f"enters module {self._names[row[0]]}" for r, row in enumerate(told)}
        if len(set(names.values())) > 1:
            listing = "\n".join(f"  rank {r} {text}" for r, text in names.items())
            raise RanksDisagreeError(f"ranks run different modules at ZeRO stage 3:\n{listing}\n{REMEDY}", names)


def _gathered_at(module: torch.nn.Module, param: torch.nn.Parameter) -> bool:
    """True if entering `module` makes ZeRO-3 gather `param`: its owner does, or the leaf module that it belongs to."""
    if not zero.is_partitioned(param):  # persistent ones too: DeepSpeed gathers them until it has seen a whole pass
        return False
    leaf = zero.leaf_of(param)
    return leaf is module if leaf is not None else any(p is param for p in module.parameters(recurse=False))
