"""Where a loss came from: through the engine, or around it (the DDP fault).

A forward through `engine.module` skips DeepSpeed's bookkeeping: at stage 0 each rank then trains its own replica, at stage 3
the gradients of earlier micro steps are overwritten, both without an error. So every training forward marks what it returns,
and a backward from the wrong mark, or outside of `engine.backward`, is refused as it starts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from bigtrain import ranks, steps, zero
from bigtrain.errors import BypassError, UsageError
from bigtrain.meeting import announce_failure

_taken: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules of engines that were not closed


def refuse_taken(module: torch.nn.Module) -> None:
    """Check that no engine trains this module already.

    Raises:
        UsageError: one does.
    """
    if module in _taken:
        raise UsageError(
            f"this {type(module).__name__} belongs to an Engine that was not closed, and whose hooks are on its parameters. Call "
            "engine.close() on that one first."
        )


class Origin:
    """Marks the outputs of a module's training forwards and checks them at backward.

    Args:
        module: the model.
        step: gives the number of steps done.
    """

    def __init__(self, module: torch.nn.Module, step: Callable[[], int]):
        self._step = step
        self._in_forward = False
        self._in_backward = False
        self._module = weakref.ref(module)
        self._handles = [module.register_forward_hook(self._mark)]
        if any(zero.is_partitioned(p) for p in module.parameters()):
            self._handles.append(module.register_forward_pre_hook(self._refuse_inference))
        _taken.add(module)

    def release(self) -> None:
        """Mark no more: the engine is closed."""
        for handle in self._handles:
            handle.remove()
        if (module := self._module()) is not None:
            _taken.discard(module)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The engine's own forward."""
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The engine's own backward."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def _mark(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or module is not self._module():  # a deep copy has the hook too
            return
        check = self.check if self._in_forward else self._bypassed
        for tensor in steps.output_tensors(output):
            tensor.register_hook(lambda grad, check=check: check())

    def _refuse_inference(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Weights gathered in inference mode are inference tensors for good: the next training forward could not save them."""
        if torch.is_inference_mode_enabled() and not all(zero.is_available(p) for p in module.parameters()):
            raise UsageError(
                "a forward under torch.inference_mode() at stage 3 would leave weights behind that cannot be trained: use torch.no_grad()."
            )

    def check(self) -> None:
        """Called for gradients: refuse a backward that the engine did not start."""
        if not self._in_backward:
            self.refuse(
                "loss.backward() was called directly: gradients would not be reduced over ranks and micro steps. "
                "Call engine.backward(loss)."
            )

    def _bypassed(self) -> None:
        self.refuse(
            "this loss came from engine.module(...): each rank would train its own replica (or overwrite the gradients of "
            "earlier micro steps). Call the engine itself: loss = engine(**batch).loss."
        )

    def refuse(self, message: str) -> NoReturn:
        """Tell the other ranks, then raise BypassError."""
        announce_failure(self._step())
        raise BypassError(f"step {self._step() + 1}, rank {ranks.rank()}: {message}")
