"""AdamW whose fp32 master is the model's own bf16 weight plus 16 more bits: no separate master copy exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bigtrain.errors import UsageError
from bigtrain.optim import arithmetic
from bigtrain.optim.state import load_keeping_dtypes
from bigtrain.optim.table import BLOCK_ELEMS

# Elements updated at a time: on a CPU its fp32 temporaries should stay in the cache, on a GPU one launch should fill the card.
CHUNK_ELEMS = {"cpu": 1 << 16, "cuda": 1 << 27}
# Gradients in pieces that do not follow each other in memory are copied together this many elements at a time.
GATHER_ELEMS = 1 << 25


class AdamWSplit(torch.optim.Optimizer):
    """AdamW on bf16 parameters with fp32-master arithmetic.

    State of each parameter: `low`, int16, the master's missing mantissa bits; and the moments: `exp_avg`, `exp_avg_sq`, fp32
    (the sign of `exp_avg_sq` holds one more bit of the master), or `state1`, `state2`, uint8, with `absmax1`, `absmax2`, fp32,
    one for 256 elements. With fp32 moments the master follows `torch.optim.AdamW(foreach=False)` on fp32 CPU tensors bit for
    bit. `bigtrain.optim.arithmetic` defines the arithmetic; on a CUDA device one Triton kernel does all of it.

    Under DeepSpeed, `attach` (the table's hook) hands the reduced gradients over in their own dtype and the clipping as one
    factor, so that nothing is rounded to bf16 on the way.

    Args:
        params: bf16 parameters or groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        moments: "float32" or "8bit".
        exact_root: correctly rounded square root on the CPU too (see `arithmetic`).

    Raises:
        UsageError: by the first step, if a parameter is not bf16 then.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments: str = "float32",
        exact_root: bool = False,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.eight_bit = moments == "8bit"
        self.exact_root = exact_root
        self.grad_factor: torch.Tensor | float | None = None
        self._pieces: dict[torch.Tensor, Sequence[torch.Tensor]] = {}

    def hand_over(self, param: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Give the next step's gradient as tensors that in this order cover `param`; used once, instead of `.grad`."""
        self._pieces[param] = pieces

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                pieces = self._pieces.pop(param, None)
                if pieces is None and param.grad is not None:
                    pieces = [param.grad]
                if pieces is not None and param.numel():
                    self._update(param, pieces, group)

    def _update(self, param: torch.Tensor, pieces: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(self.new_state(param))
        state["step"] += 1
        scalars = arithmetic.Scalars.of(state["step"], float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
        update = self._on_gpu if param.device.type == "cuda" else self._on_cpu
        weight = param.detach().view(-1)
        for start, grad in chunks(pieces, CHUNK_ELEMS[param.device.type]):
            here = slice(start, start + grad.numel())
            blocks = slice(start // BLOCK_ELEMS, -(-(start + grad.numel()) // BLOCK_ELEMS))
            parts = {k: t[blocks if k.startswith("absmax") else here] for k, t in state.items() if k != "step"}
            update(weight[here], grad, parts, scalars)

    def _on_cpu(self, weight: torch.Tensor, grad: torch.Tensor, parts: dict[str, torch.Tensor], s: arithmetic.Scalars) -> None:
        grad = grad.float()
        if self.grad_factor is not None:
            grad = grad * self.grad_factor
        if self.eight_bit:
            m = arithmetic.decode(parts["state1"], parts["absmax1"], signed=True)
            v = arithmetic.decode(parts["state2"], parts["absmax2"], signed=False)
            master = arithmetic.join_master(weight, parts["low"])
        else:
            m, v = parts["exp_avg"], parts["exp_avg_sq"]
            master = arithmetic.join_master(weight, parts["low"], torch.signbit(v))
            v.abs_()
        arithmetic.adamw_(master, grad, m, v, s, self.exact_root)
        high, low, tie = arithmetic.split_master(master)
        weight.copy_(high)
        if self.eight_bit:
            low = arithmetic.saturate_low(low, tie)
            for (code, scale), values in zip((("state1", "absmax1"), ("state2", "absmax2")), (m, v)):
                index, largest = arithmetic.encode(values, signed=code == "state1")
                parts[code].copy_(index)
                parts[scale].copy_(largest)
        elif tie.any():
            v.copy_(torch.where(tie, v.neg(), v))
        parts["low"].copy_(low)

    def _on_gpu(self, weight: torch.Tensor, grad: torch.Tensor, parts: dict[str, torch.Tensor], s: arithmetic.Scalars) -> None:
        from bigtrain.optim import triton_kernels

        triton_kernels.update(weight, grad, parts, s, self.grad_factor)

    def new_state(self, param: torch.Tensor) -> dict[str, Any]:
        """The state before the first update: the master is the bf16 weight itself."""
        if param.dtype != torch.bfloat16:
            raise UsageError(f"adamw_split needs bf16 parameters, not {param.dtype}: set bf16.enabled, or choose adamw.")
        n, device = param.numel(), param.device
        blocks = -(-n // BLOCK_ELEMS)
        layout = {"low": (n, torch.int16)}
        if self.eight_bit:
            layout |= {"state1": (n, torch.uint8), "state2": (n, torch.uint8)}
            layout |= {"absmax1": (blocks, torch.float32), "absmax2": (blocks, torch.float32)}
        else:
            layout |= {"exp_avg": (n, torch.float32), "exp_avg_sq": (n, torch.float32)}
        state: dict[str, Any] = {k: torch.zeros(size, dtype=dtype, device=device) for k, (size, dtype) in layout.items()}
        if self.eight_bit:  # the code of zero; with scale 0 any code means 0, this one also if a scale is changed by hand
            state["state1"].fill_(int((arithmetic.code_tables(True, torch.device("cpu"))[0] == 0).nonzero()))
        return {"step": 0, **state}

    def master(self, param: torch.Tensor) -> torch.Tensor:
        """The fp32 master of `param`, flat, as a new tensor."""
        state = self.state.get(param)
        if not state:
            return param.detach().view(-1).float()
        tie = None if self.eight_bit else torch.signbit(state["exp_avg_sq"])
        return arithmetic.join_master(param.detach().view(-1), state["low"], tie)

    @torch.no_grad()
    def set_master(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """Set `param` and its state from a flat fp32 master."""
        state = self.state[param]
        if not state:
            state.update(self.new_state(param))
        high, low, tie = arithmetic.split_master(master)
        param.detach().view(-1).copy_(high)
        if self.eight_bit:
            low = arithmetic.saturate_low(low, tie)
        else:
            v = state["exp_avg_sq"].abs()
            state["exp_avg_sq"].copy_(torch.where(tie, v.neg(), v))
        state["low"].copy_(low)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every state tensor keeps its dtype."""
        load_keeping_dtypes(self, state_dict, super().load_state_dict)


def chunks(pieces: Sequence[torch.Tensor], limit: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Flat gradient chunks with their offsets, each starting at a multiple of 256, without a copy where memory allows.

    Args:
        pieces: contiguous tensors that follow each other in the partition.
        limit: elements of a chunk at most; a multiple of 256.
    """
    runs = _runs([p.reshape(-1) for p in pieces if p.numel()])
    if len(runs) == 1:
        for start in range(0, runs[0].numel(), limit):
            yield start, runs[0][start : start + limit]
        return
    limit = min(limit, GATHER_ELEMS)
    waiting: list[torch.Tensor] = []
    start = filled = 0
    for run in runs:
        while run.numel():
            part, run = run[: limit - filled], run[limit - filled :]
            waiting.append(part)
            filled += part.numel()
            if filled == limit:
                yield start, waiting[0] if len(waiting) == 1 else torch.cat(waiting)
                start, filled, waiting = start + filled, 0, []
    if waiting:
        yield start, waiting[0] if len(waiting) == 1 else torch.cat(waiting)


def _runs(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join neighbours that also follow each other in memory (views of one buffer)."""
    runs: list[torch.Tensor] = []
    for piece in pieces:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.dtype == piece.dtype
            and last.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
            and last.storage_offset() + last.numel() == piece.storage_offset()
        ):
            runs[-1] = last.as_strided((last.numel() + piece.numel(),), (1,))
        else:
            runs.append(piece)
    return runs


def attach(ds_engine: Any) -> None:
    """Let an `AdamWSplit` inside a DeepSpeed engine work on the model's own weights and on unrounded gradients."""
    from bigtrain import flat

    optimizer = ds_engine.basic_optimizer
    flat.alias_master(ds_engine.optimizer)
    flat.hand_over_gradients(ds_engine.optimizer, optimizer)
