"""ZeRO stage 0: whole fp32 master weights and fp32 gradient accumulation on every rank.

DeepSpeed 0.19.8 without ZeRO accumulates bf16 gradients in bf16 and refuses fp32 accumulation ("unsupported mix of
model_dtype and grad_accum_dtype"). This optimizer does it: each backward adds the parameters' gradients to one fp32 buffer,
which DeepSpeed averages over ranks at the end of the step (it asks `get_grads_for_reduction`); the update runs on fp32
masters and is rounded back once. A parameter that is fp32 already (fp32 training, `keep_in_fp32`) is its own master.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bigtrain.engine.hostgradients import norm_of

Groups = list[dict[str, Any]]


class MasterOptimizer(torch.optim.Optimizer):
    """Wraps the real optimizer at stage 0.

    Args:
        groups: parameter groups over the model's parameters.
        build: makes the inner optimizer from groups over the masters.
        max_norm: clip the global gradient norm at this value; 0 for no clipping.

    Attributes:
        overflow: the last step was not applied because its gradient norm was not finite (DeepSpeed reads it).
        refuse: discard the next step whatever its gradients are.
    """

    def __init__(self, groups: Groups, build: Callable[[Groups], torch.optim.Optimizer], max_norm: float):
        # The base class is not initialised: state and groups are the inner optimizer's own objects.
        self.model_params = [p for group in groups for p in group["params"]]
        masters = self._of = {id(p): _master(p) for p in self.model_params}
        self.masters = [masters[id(p)] for p in self.model_params]
        self.inner = build([{**group, "params": [masters[id(p)] for p in group["params"]]} for group in groups])
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.defaults = self.inner.defaults
        self.max_norm = max_norm
        self.overflow = False
        self.refuse = False
        self._global_grad_norm = 0.0
        elems, device = sum(p.numel() for p in self.masters), self.masters[0].device
        self.flat = torch.zeros(elems, dtype=torch.float32, device=device)
        self.views = [v.view_as(p) for v, p in zip(self.flat.split([p.numel() for p in self.masters]), self.masters)]
        # Hooks of the nodes run after the parameters' own, so that those find the gradient, whenever they were registered. A node
        # lives as long as somebody keeps it.
        self._nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in self.model_params]
        hooked = zip(self._nodes, self.model_params, self.views)
        self.handles = [node.register_hook(_adder(param, view)) for node, param, view in hooked]

    def destroy(self) -> None:
        """Leave the parameters to whoever comes next."""
        for handle in self.handles:
            handle.remove()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Make masters anew from the weights: DeepSpeed gives every rank those of rank 0, and knows of no masters."""
        for param, master in zip(self.model_params, self.masters):
            if param is not master:
                master.copy_(param)

    def master_of(self, param: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """(0, the flat fp32 master) of a model parameter; None if it has none of its own. As `zero.flat.master_of`."""
        master = self._of.get(id(param))
        if master is None or master is param or not master.is_contiguous():
            return None
        return 0, master.detach().view(-1)

    def get_grads_for_reduction(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """What DeepSpeed averages over ranks: every parameter, so that one unused on some rank counts as zero there."""
        return list(self.views), {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Norm, clip, update the masters, round them to the model's dtype."""
        norm = norm_of(self.flat)  # torch's own on a CPU adds up in fp32: 1 % too small for 1e8 elements
        self.overflow = self.refuse or not bool(torch.isfinite(norm))
        self._global_grad_norm = float("inf") if self.overflow else float(norm)
        if self.overflow:
            self.flat.zero_()
            return
        if self.max_norm > 0.0:
            self.flat.mul_(1.0 / torch.clamp((norm + 1e-6) / self.max_norm, min=1.0))
        for master, view in zip(self.masters, self.views):
            master.grad = view
        self.inner.step()
        for param, master in zip(self.model_params, self.masters):
            master.grad = None
            if param is not master:
                param.copy_(master)
        self.flat.zero_()

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it for every instance once one is copied, in what needs its __init__

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what has been accumulated."""
        self.flat.zero_()
        for param in self.model_params:
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the masters."""
        return {"inner": self.inner.state_dict(), "masters": [m.detach() for m in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for param, master, saved in zip(self.model_params, self.masters, state_dict["masters"]):
            master.copy_(saved)
            if param is not master:
                param.copy_(master)


def _master(param: torch.nn.Parameter) -> torch.nn.Parameter:
    if param.dtype == torch.float32:
        return param
    master = torch.nn.Parameter(param.detach().float())
    master.is_hidden_matrix = getattr(param, "is_hidden_matrix", False)  # type: ignore[attr-defined]  # muon asks it
    return master


def _adder(param: torch.Tensor, view: torch.Tensor) -> Callable[..., None]:
    @torch.no_grad()
    def add(*_: Any) -> None:
        if param.grad is not None:
            view.add_(param.grad)
            param.grad = None

    return add
