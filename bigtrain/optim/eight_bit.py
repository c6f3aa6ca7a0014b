"""AdamW with bitsandbytes' 8-bit moments on ZeRO partitions of any size, on cards and on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bigtrain.errors import BuildError, UsageError
from bigtrain.optim import cpu_kernel
from bigtrain.optim.arithmetic import Scalars, code_tables
from bigtrain.optim.chunks import chunk_elems
from bigtrain.optim.split import by_torch
from bigtrain.optim.state import load_keeping_dtypes
from bigtrain.optim.table import BLOCK_ELEMS, MIN_8BIT_ELEMS

bnb: Any
try:
    import bitsandbytes.functional as bnb
    from bitsandbytes.optim import GlobalOptimManager
except ImportError as error:  # an optional part of the installation
    bnb, _why = None, str(error)

# bitsandbytes' kernels count elements in a signed 32-bit integer; a chunk must also end on a block of 8-bit state.
MAX_CHUNK_ELEMS = (2**31 - 1) // BLOCK_ELEMS * BLOCK_ELEMS


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with block-wise 8-bit moments: bitsandbytes' codes and state.

    On a card by bitsandbytes' kernel. An fp32 weight on the host is updated as `adamw_split_8bit` updates its master (see
    `arithmetic`): the same codes, without the temporaries of bitsandbytes' own update there (19 bytes an element) and in less
    time (docs/log.md). The two round alike but for the last bit.

    Differs from `bitsandbytes.optim.AdamW8bit` also in this: a tensor above 2^31-1 elements is updated in chunks of whole
    256-element blocks, with the same result, where bitsandbytes fails with "invalid argument ... ops.cu"; and the learning
    rate, betas and so on are read from the group alone. Moments are uint8 with one fp32 scale a block; tensors below
    `MIN_8BIT_ELEMS` elements keep fp32 moments. Per-parameter overrides of bitsandbytes' GlobalOptimManager are refused: ZeRO
    hands over flat partitions, in which parameters have no names.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        compiled: update on the host by the compiled kernel, which must be `cpu_kernel.ready()`.

    Raises:
        BuildError: if bitsandbytes is not installed.
        UsageError: if GlobalOptimManager holds overrides.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compiled: bool = False,
    ):
        if bnb is None:
            raise BuildError(f"optimizer adamw_8bit needs bitsandbytes ({_why}): pip install 'bitsandbytes>=0.50'")
        manager = GlobalOptimManager.get_instance()
        if manager.pid2config or manager.module_weight_config_triple:
            raise UsageError(
                "bitsandbytes' GlobalOptimManager holds per-parameter overrides (override_config, register_module_override); "
                "under ZeRO partitions they would be lost. Remove them, or use optimizer adamw for 32-bit states everywhere."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.compiled = compiled

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad = param.grad.contiguous().view(-1)  # type: ignore[union-attr]
        update = self.begin(param, group)
        size = MAX_CHUNK_ELEMS
        if param.device.type == "cpu" and not self.compiled:  # temporaries of fp32, which should stay in the caches
            size = min(size, chunk_elems("cpu"))
        for start in range(0, grad.numel(), size):
            update(start, grad[start : start + size])

    def begin(self, param: torch.Tensor, group: dict[str, Any]) -> Callable[[int, torch.Tensor], None]:
        """Count an update of one parameter; the function that does it for a part: first element, a multiple of 256, and gradient."""
        state = self.state[param]
        if not state:
            state.update(_new_state(param))
        state["step"] += 1
        return partial(self._update_chunk, param.detach().view(-1), state, group)

    def _update_chunk(
        self, weight: torch.Tensor, state: dict[str, Any], group: dict[str, Any], start: int, grad: torch.Tensor
    ) -> None:
        end = start + grad.numel()
        here = slice(start, end)
        m, v = state["state1"].view(-1)[here], state["state2"].view(-1)[here]
        beta1, beta2 = group["betas"]
        decay, eps, lr, step = group["weight_decay"], group["eps"], float(group["lr"]), state["step"]
        if m.dtype == torch.float32:
            bnb.optimizer_update_32bit(
                "adam", grad, weight[here], m, beta1, eps, step, lr, v, beta2, 0.0, 0.0, decay, 1.0, None, 0.0
            )
            return
        blocks = slice(start // BLOCK_ELEMS, -(-end // BLOCK_ELEMS))
        scales = state["absmax1"][blocks], state["absmax2"][blocks]
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            parts = {"state1": m, "state2": v, "absmax1": scales[0], "absmax2": scales[1]}
            scalars = Scalars.of(step, lr, (beta1, beta2), eps, decay)
            update = cpu_kernel.update if self.compiled else by_torch
            update(weight[here], grad, parts, scalars, None, start=start, salt=0, exact_root=False)
            return
        code1, code2 = (code_tables(signed, weight.device)[0] for signed in (True, False))
        bnb.optimizer_update_8bit_blockwise(
            "adam", grad, weight[here], m, v, beta1, beta2, 0.0, 0.0, eps, step, lr, code1, code2, *scales, decay
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's own rule would cast the uint8 moments and fp32 scales to the parameter's dtype; keep theirs."""
        load_keeping_dtypes(self, state_dict, super().load_state_dict)


def _new_state(param: torch.Tensor) -> dict[str, Any]:
    def zeros(elems: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(elems, dtype=dtype, device=param.device)

    n = param.numel()
    if n < MIN_8BIT_ELEMS:
        return {"step": 0, "state1": zeros(n, torch.float32), "state2": zeros(n, torch.float32)}
    blocks = -(-n // BLOCK_ELEMS)
    return {
        "step": 0,
        "state1": zeros(n, torch.uint8),
        "state2": zeros(n, torch.uint8),
        "absmax1": zeros(blocks, torch.float32),
        "absmax2": zeros(blocks, torch.float32),
    }
