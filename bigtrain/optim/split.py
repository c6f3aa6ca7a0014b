"""AdamW whose fp32 master is the model's own bf16 weight plus 16 more bits: no separate master copy exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigtrain import partition
from bigtrain.errors import UsageError
from bigtrain.optim import arithmetic
from bigtrain.optim.lanes import Lanes, lanes_for
from bigtrain.optim.options import Offload
from bigtrain.optim.pieces import cut, joined
from bigtrain.optim.spill import SpilledGradients
from bigtrain.optim.state import load_keeping_dtypes
from bigtrain.optim.stream import Stream, Update
from bigtrain.optim.table import BLOCK_ELEMS
from bigtrain.plan.constants import STATE_CHUNK_BYTES
from bigtrain.zero import flat

# Elements updated at a time: on a CPU its fp32 temporaries should stay in the cache, on a GPU one launch should fill the card.
CHUNK_ELEMS = {"cpu": 1 << 16, "cuda": 1 << 27}


MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


class AdamWSplit(torch.optim.Optimizer):
    """AdamW on bf16 parameters with fp32-master arithmetic.

    State of each parameter: `low`, int16, the master's missing mantissa bits; and the moments: `exp_avg`, `exp_avg_sq`, fp32 or
    bf16 (the sign of `exp_avg_sq` holds one more bit of the master), or `state1`, `state2`, uint8, with `absmax1`, `absmax2`,
    fp32, one for 256 elements. With fp32 moments the master follows `torch.optim.AdamW(foreach=False)` on fp32 CPU tensors bit
    for bit. `bigtrain.optim.arithmetic` defines the arithmetic; one Triton kernel does all of it on a CUDA device, one compiled
    loop (`cpu_kernel`) on a CPU.

    Under DeepSpeed, `attach` (the table's hook) hands the reduced gradients over in their own dtype and the clipping as one
    factor, so that nothing is rounded to bf16 on the way.

    Args:
        params: bf16 parameters or groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        moments: "float32", "bfloat16" or "8bit".
        exact_root: correctly rounded square root on the CPU too (see `arithmetic`).
        compiled: update CPU tensors by the compiled kernel, which must be `cpu_kernel.ready()`.
        offload: keep the state of parameters on a GPU in host memory (see `stream`), and some gradients (see `spill`).

    Attributes:
        grad_factor: what gradients are multiplied by in the next step.
        stream: brings the state to the GPU and back; None where it stays beside the parameters. Under DeepSpeed `attach` sets it.

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
        compiled: bool = False,
        offload: Offload | None = None,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.moments = MOMENTS[moments]
        self.exact_root = exact_root
        self.compiled = compiled
        self.offload = offload
        self.stream: Stream | None = None
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

        if self.stream is not None and not self.stream.deferred:
            self.stream.finish()

    def _update(self, param: torch.Tensor, pieces: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(self.new_state(param))
        update = self.next_update(state, group)
        if self.stream is not None:
            factor = self.grad_factor
            self.stream.add(param, state, pieces, update, [factor] if isinstance(factor, torch.Tensor) else [])
            return
        weight = param.detach().view(-1)
        for start, grads in cut(pieces, self.chunk_elems(param.device.type)):
            end = start + sum(g.numel() for g in grads)
            update(weight[start:end], joined(grads), part_of(state, start, end), start)

    def chunk_elems(self, device: str) -> int:
        """Elements updated at a time: the compiled kernel needs no small pieces."""
        return CHUNK_ELEMS["cuda" if self.compiled else device]

    def next_update(self, state: dict[str, Any], group: dict[str, Any]) -> Update:
        """Count an update of one parameter; the function that does it, for any of its chunks."""
        state["step"] += 1
        step = state["step"]
        scalars = arithmetic.Scalars.of(step, float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
        factor, salt = self.grad_factor, arithmetic.salt_of(step)

        def update(weight: torch.Tensor, grad: torch.Tensor, parts: dict[str, torch.Tensor], start: int) -> None:
            if weight.device.type == "cuda":
                from bigtrain.optim import triton_kernels

                triton_kernels.update(weight, grad, parts, scalars, factor, start=start, salt=salt)
            elif self.compiled:
                from bigtrain.optim import cpu_kernel

                exact = self.exact_root
                cpu_kernel.update(weight, grad, parts, scalars, factor, start=start, salt=salt, exact_root=exact)
            else:
                by_torch(weight, grad, parts, scalars, factor, start=start, salt=salt, exact_root=self.exact_root)

        return update

    def layout(self, n: int) -> dict[str, tuple[int, torch.dtype]]:
        """Length and dtype of each state tensor of a parameter of `n` elements."""
        blocks = -(-n // BLOCK_ELEMS)
        if self.moments == torch.uint8:
            scales = {"absmax1": (blocks, torch.float32), "absmax2": (blocks, torch.float32)}
            return {"low": (n, torch.int16), "state1": (n, torch.uint8), "state2": (n, torch.uint8), **scales}
        return {"low": (n, torch.int16), "exp_avg": (n, self.moments), "exp_avg_sq": (n, self.moments)}

    def new_state(self, param: torch.Tensor) -> dict[str, Any]:
        """The state before the first update: the master is the bf16 weight itself."""
        if param.dtype != torch.bfloat16:
            raise UsageError(f"adamw_split needs bf16 parameters, not {param.dtype}: set bf16.enabled, or choose adamw.")
        state: dict[str, Any] = {"step": 0}
        if self.stream is not None:
            self.stream.home(param, state)
        else:
            layout = self.layout(param.numel())
            state |= {k: torch.zeros(n, dtype=dtype, device=param.device) for k, (n, dtype) in layout.items()}
        first_codes(state)
        return state

    def master(self, param: torch.Tensor) -> torch.Tensor:
        """The fp32 master of `param`, flat, as a new tensor."""
        self.synchronize()
        state = self.state.get(param)
        if not state:
            return param.detach().view(-1).float()
        tie = torch.signbit(state["exp_avg_sq"]).to(param.device) if "exp_avg_sq" in state else None
        return arithmetic.join_master(param.detach().view(-1), state["low"].to(param.device), tie)

    @torch.no_grad()
    def set_master(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """Set `param` and its state from a flat fp32 master."""
        self.synchronize()
        state = self.state[param]
        if not state:
            state.update(self.new_state(param))
        high, low, tie = arithmetic.split_master(master)
        param.detach().view(-1).copy_(high)
        if "exp_avg_sq" in state:
            v = state["exp_avg_sq"].abs()
            state["exp_avg_sq"].copy_(torch.where(tie.to(v.device), v.neg(), v))
        else:
            low = arithmetic.saturate_low(low, tie)
        state["low"].copy_(low)

    def synchronize(self) -> None:
        """Return when every weight is updated and all state may be read and changed where it lies."""
        if self.stream is not None:
            self.stream.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """As torch's; what streams is in host memory when it returns, until the next step."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every state tensor keeps its dtype."""
        self.synchronize()
        load_keeping_dtypes(self, state_dict, super().load_state_dict)


def first_codes(state: dict[str, Any]) -> None:
    """Fill fresh 8-bit moments with the code of zero; with scale 0 any code means 0, this one also if a scale is set by hand."""
    if "state1" in state:
        state["state1"].fill_(int((arithmetic.code_tables(True, torch.device("cpu"))[0] == 0).nonzero()))


def part_of(state: dict[str, Any], start: int, end: int) -> dict[str, torch.Tensor]:
    """The state tensors of elements `start` (a multiple of 256) to `end`."""
    blocks = slice(start // BLOCK_ELEMS, -(-end // BLOCK_ELEMS))
    return {k: t[blocks if k.startswith("absmax") else slice(start, end)] for k, t in state.items() if k != "step"}


def by_torch(
    weight: torch.Tensor,
    grad: torch.Tensor,
    parts: dict[str, torch.Tensor],
    s: arithmetic.Scalars,
    factor: torch.Tensor | float | None,
    *,
    start: int,
    salt: int,
    exact_root: bool,
) -> None:
    """Update one flat chunk in place through torch; arguments as `cpu_kernel.update`."""
    grad = grad.float()
    if factor is not None:
        grad = grad * factor
    if "state1" in parts:
        m = arithmetic.decode(parts["state1"], parts["absmax1"], signed=True)
        v = arithmetic.decode(parts["state2"], parts["absmax2"], signed=False)
        master = arithmetic.join_master(weight, parts["low"]) if "low" in parts else weight
    else:
        master = arithmetic.join_master(weight, parts["low"], torch.signbit(parts["exp_avg_sq"]))
        m, v = parts["exp_avg"].float(), parts["exp_avg_sq"].abs().float()
    arithmetic.adamw_(master, grad, m, v, s, exact_root)
    if "state1" in parts:
        for (code, scale), values in zip((("state1", "absmax1"), ("state2", "absmax2")), (m, v)):
            index, largest = arithmetic.encode(values, signed=code == "state1")
            parts[code].copy_(index)
            parts[scale].copy_(largest)
    if "low" not in parts:
        return  # the weight is the master
    high, low, tie = arithmetic.split_master(master)
    weight.copy_(high)
    if "state1" in parts:
        low = arithmetic.saturate_low(low, tie)
    elif parts["exp_avg"].dtype == torch.bfloat16:
        for name, rounded in zip(("exp_avg", "exp_avg_sq"), arithmetic.round_moments(m, v, tie, start, salt)):
            parts[name].copy_(rounded)
    else:
        parts["exp_avg"].copy_(m)
        parts["exp_avg_sq"].copy_(torch.where(tie, v.neg(), v))
    parts["low"].copy_(low)


def attach(ds_engine: Any) -> None:
    """Let an `AdamWSplit` inside a DeepSpeed engine work on the model's own weights and on unrounded gradients."""
    optimizer, ds_optimizer = ds_engine.basic_optimizer, ds_engine.optimizer
    flat.alias_master(ds_optimizer)
    flat.hand_over_gradients(ds_optimizer, optimizer)
    layouts = flat.partition_layouts(ds_optimizer)
    device = next(iter(layouts)).device
    if optimizer.offload is not None and device.type != "cpu":
        stream_state(ds_engine, layouts, lanes_for(device), optimizer.offload)


def stream_state(
    ds_engine: Any,
    layouts: dict[torch.Tensor, flat.PartitionLayout],
    lanes: Lanes,
    offload: Offload,
    chunk_bytes: int = STATE_CHUNK_BYTES,
) -> None:
    """Give the optimizer of a DeepSpeed engine a stream, and host memory for the gradients that leave."""
    optimizer, device = ds_engine.basic_optimizer, next(iter(layouts)).device
    ratio, pin, buffers, share = offload
    stream = optimizer.stream = Stream(
        optimizer.layout, lanes, device, ratio=ratio, pin=pin, chunk_bytes=chunk_bytes, buffers=buffers
    )
    flat.stream_updates(stream, ds_engine.module, ds_engine.optimizer, layouts)
    if share > 0.0:
        placed = [m.param for layout in layouts.values() for m in layout.matrices]
        in_partitions = {id(p) for p in placed}
        ordered = [p for p in ds_engine.module.parameters() if id(p) in in_partitions]
        leaving = {id(ordered[i]) for i in partition.last_share([p.numel() for p in ordered], share)}
        params = [p for p in placed if id(p) in leaving]
        stream.gradients = SpilledGradients(params, lanes, chunk_elems=stream.chunk_elems, pin=pin)
