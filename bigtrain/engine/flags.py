"""Which parameters got a sound gradient, known on the device without a wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class GradientFlags:
    """Marks, on the device, parameters whose local gradient was not finite, and gradients computed outside of the engine.

    Two small kernels a parameter and backward; nothing is read before the end of the step. To be made before DeepSpeed's hooks,
    which take the gradient away.

    Attributes:
        marks: fp32, one of each parameter; finite if its gradients were.
        check: called for every gradient that arrives.
        summing: look at each gradient as it arrives; else `take` is called before the marks are read.
    """

    def __init__(self, params: list[torch.nn.Parameter], device: torch.device):
        self.marks = torch.zeros(max(1, len(params)), device=device)
        self.check: Callable[[], None] = lambda: None
        self.summing = True
        self._index = {id(p): i for i, p in enumerate(params)}
        self._places: torch.Tensor | None = None
        self.handles = [param.register_post_accumulate_grad_hook(self._marker(i)) for i, param in enumerate(params)]

    def _marker(self, i: int) -> Callable[[torch.Tensor], None]:
        mark = self.marks[i]

        def note(param: torch.Tensor) -> None:
            self.check()
            if self.summing and param.grad is not None:
                with torch.no_grad():
                    # Finite as long as all gradients are: a sum of finite numbers in fp32 does not overflow below 1e38.
                    mark.add_(param.grad.sum(dtype=torch.float32))

        return note

    @torch.no_grad()
    def take(self, norms: torch.Tensor, params: Sequence[torch.nn.Parameter]) -> None:
        """Mark by the norms of the step's whole gradients: what was not finite in one micro batch stays so in the sum.

        Args:
            norms: fp32, one of each parameter.
            params: in that order; what is not traced is left out.
        """
        if not self._index:
            return
        if self._places is None:  # the same every time: sent once
            self._places = torch.tensor([self._index[id(p)] for p in params], device=norms.device)
        self.marks[self._places] = norms * 0.0

    def first(self) -> int:
        """Index of the first marked parameter, or -1; waits for the device."""
        marked = (~torch.isfinite(self.marks)).nonzero()
        return int(marked[0]) if len(marked) else -1

    def clear(self) -> None:
        """Start a new step."""
        self.marks.zero_()
