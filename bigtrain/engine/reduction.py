"""How gradients leave a backward: every parameter, on every rank, in an order that all ranks share.

DeepSpeed's ZeRO stages 1-3 reduce the parameters that got a gradient, in the order they got it. If ranks used different
parameters, their buckets hold different things: sizes mismatch (an abort or a hang), or sums mix silently. And at stage 3 a
parameter that no rank used keeps the gradient of an earlier step in its partition. Both end here: parameters without a
gradient are reduced as zeros, and when ranks differ, one backward's reduction waits until its end and then runs in one order.

Attributes of DeepSpeed 0.19.8's objects used, on instances only:
  engine     step, was_step_applied, optimizer, basic_optimizer, _global_grad_norm, is_gradient_accumulation_boundary,
             set_gradient_accumulation_boundary
  all three  clear_backward_seen_flag
  zero12     averaged_gradients, bit16_groups, setup_buckets, reduce_ready_partitions_and_remove_grads, reduce_gradients,
             partition_gradients, process_gradients, params_in_partition,
             partition_size, cpu_offload, is_gradient_accumulation_boundary, dp_process_group,
             _epilogue_ran_this_backward, overlapping_partition_gradients_reduce_epilogue, scaled_global_norm, use_grad_accum_attribute,
             gradient_accumulation_dtype, has_overflow, _add_to_grad_partition_buffer, _use_compact_grad_partition_buffer,
             _get_compact_grad_partition_buffer
  zero3      fp16_groups, reduce_ready_partitions_and_remove_grads, overlapping_partition_gradients_reduce_epilogue,
             _get_norm_groups
  bf16       fp32_groups_has_gradients, get_grads_for_norm, fp32_groups_flat_partition
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bigtrain import zero
from bigtrain.engine.flags import GradientFlags
from bigtrain.engine.hostgradients import HostGradients, add_to, norm_of, norms_of
from bigtrain.engine.sums import KeptSums
from bigtrain.errors import ModelError
from bigtrain.zero import flat

INVALID_NORM = -1.0  # DeepSpeed's sign for a norm that is not finite: it discards the step


class Reduction:
    """Substitutes the reduction and norm methods on one DeepSpeed optimizer instance.

    Args:
        ds_engine: what `zero.initialize` returned.
        params: the trainable parameters in the model's order.
        flags: theirs.

    Attributes:
        kind: which wrapper DeepSpeed chose (`zero.optimizer_kind`).
        during_backward: True if gradients are reduced inside backward, so that ranks must use the same parameters.
        alone: in this step gradients stay where autograd puts them.
        straight: in this step each gradient is added to its sum as soon as autograd gives it.
        order_hash: hash of the order of reduction since the last step.
    """

    def __init__(self, ds_engine: Any, params: list[torch.nn.Parameter], flags: GradientFlags):
        self.ds = ds_engine
        self.optimizer = ds_engine.optimizer
        self.kind = zero.optimizer_kind(self.optimizer)
        self.params = params
        self.order_hash = 0
        self.during_backward = self.kind == "zero3" or (self.kind == "zero12" and self.optimizer.partition_gradients)
        self._norm: float | None = None
        self._refuse = False
        self._deferred = False
        self._seen: dict[int, None] = {}  # in this backward, in the order in which they came
        self._entries: list[tuple[torch.nn.Parameter, tuple[int, ...]]] = []  # in the order that all ranks share
        self.stream = getattr(getattr(ds_engine, "basic_optimizer", None), "stream", None)  # optim.stream, with offload
        self._one_rank = self._nobody_to_reduce_with()
        self._dtypes = self._dtypes_of_sums()
        self._flags = flags
        self._arrange(only=False)
        self._sums: dict[int, torch.Tensor] = {}  # of the step under way, where gradients are added straight
        self._kept_sums: KeptSums | None = None
        self._norms: torch.Tensor | None = None  # of each gradient, in the order of the partitions
        self._taken: torch.Tensor | None = None  # the step's norm, if it was asked for before
        if self.kind in ("zero12", "zero3"):
            self._substitute()

    def _nobody_to_reduce_with(self) -> bool:
        """One rank at stage 2 without offload: gradients can stay where autograd puts them, or go from there into wider sums.

        DeepSpeed would copy each into a bucket, divide it by one, and copy it out again: 65 ms a step and two buckets of
        memory for 3.2e9 parameters on an H200.
        """
        o = self.optimizer
        return self.kind == "zero12" and torch.distributed.get_world_size() == 1 and o.partition_gradients and not o.cpu_offload

    def _dtypes_of_sums(self) -> tuple[torch.dtype, torch.dtype] | None:
        """At stage 2 (gradients' own, that of sums over micro batches); None elsewhere, or if gradients are of several dtypes."""
        o = self.optimizer
        if self.kind != "zero12" or not o.partition_gradients or o.cpu_offload:
            return None
        own = {p.dtype for group in o.bit16_groups for p in group}
        return (own.pop(), o.gradient_accumulation_dtype) if len(own) == 1 else None

    def _arrange(self, only: bool) -> None:
        """Before a backward, `only` if it is all of its step: what gradients are summed in, and whether they stay where they are.

        One backward has nothing to sum, so its own dtype gives the same bits (tests/ranks/test_engine_alone.py) without a
        partition in a wider one.
        """
        self.alone = self.straight = False
        if self._dtypes is not None:
            (own, sums), o = self._dtypes, self.optimizer
            o.gradient_accumulation_dtype = own if only else sums
            self.alone = self._one_rank and (only or own == sums)
            groups = range(len(o.params_in_partition))
            self.straight = self._one_rank and not self.alone and all(map(o._use_compact_grad_partition_buffer, groups))
        # Whether each gradient is finite is seen from its norm, where that is taken anyway.
        self._flags.summing = not (self.alone or self.straight) or torch.device(self.ds.device).type != "cuda"

    # ------------------------------------------------------------ which parameters this backward uses

    def begin_backward(self, last: bool, only: bool = False) -> None:
        """Before each backward, `last` for the last one of its step, `only` for one that is all of it.

        DeepSpeed ends one backward where the next forward begins. Where losses of several forwards are kept, the next one may
        come without a forward between, and stage 3 would put its gradients in the place of the earlier ones.
        """
        self._arrange(only)
        if self._kept_sums is not None:
            self._kept_sums.begin_backward(only)
        self.ds.set_gradient_accumulation_boundary(last)
        if self.kind != "plain":
            self.optimizer.clear_backward_seen_flag()
        self._seen.clear()  # of a backward that failed half-way

    def used(self) -> list[bool]:
        """For each trainable parameter, whether the backward that runs now will reach it; call from a gradient hook.

        Asks autograd's own plan of the running graph: exact, a few microseconds for each parameter, no wait for a GPU.
        """
        with torch.enable_grad():  # the nodes are looked up each time: one kept alive would keep ZeRO-3's shape of [0]
            nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self.params]
        reached = [torch._C._will_engine_execute_node(node) for node in nodes]
        del nodes
        by_leaf: dict[int, bool] = {}
        leaves = [id(zero.leaf_of(p) or p) for p in self.params]
        for leaf, yes in zip(leaves, reached):  # a ZeRO-3 leaf module reduces all its parameters if any is used
            by_leaf[leaf] = by_leaf.get(leaf, False) or yes
        return [by_leaf[leaf] for leaf in leaves]

    def defer(self) -> None:
        """Reduce nothing during the backward that runs now; at its end reduce every parameter, in one order."""
        self._deferred = True

    # ------------------------------------------------------------ the update

    def step(self, refuse: bool) -> tuple[bool, float]:
        """DeepSpeed's optimizer step, or discarding the gradients if `refuse`; (applied, norm of the gradient before clipping).

        The norm is read where DeepSpeed itself waits for it, so that reading costs no further wait.
        """
        self._refuse, self._norm = refuse, None
        if self.kind == "bf16":
            self._prepare_bf16(refuse)
        elif self.kind == "plain":
            self.optimizer.refuse = refuse
        try:
            self.ds.step()
        finally:
            self._refuse = False
            self.optimizer.__dict__.pop("get_grads_for_norm", None)
        if self.stream is not None:
            self.stream.begin()
        self.order_hash = 0
        applied = bool(self.ds.was_step_applied())
        if not applied and self.kind == "zero12":
            # With offload DeepSpeed keeps the fp32 accumulators of a discarded step: its NaN would stay in them for ever.
            self.optimizer.averaged_gradients.update(dict.fromkeys(self.optimizer.averaged_gradients))
        norm = self._norm if self._norm is not None else float(self.optimizer._global_grad_norm)
        return applied, norm if applied and norm >= 0.0 else math.nan

    def _prepare_bf16(self, refuse: bool) -> None:
        optimizer = self.optimizer
        # A parameter used on some rank only has a gradient everywhere after the reduction: count it everywhere, or ranks
        # compute different norms and clip differently.
        optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in optimizer.fp32_groups_has_gradients]
        device = optimizer.fp32_groups_flat_partition[0].device
        whole = optimizer.get_grads_for_norm
        if refuse:
            norm = torch.full((1,), math.inf, device=device)
        elif device.type == "cpu":  # DeepSpeed adds up in fp32: 1 % too small for 1e8 elements
            norm = torch.stack(norms_of(whole(for_clipping=True))).norm().float().reshape(1)
        else:
            return
        optimizer.get_grads_for_norm = lambda for_clipping=False: whole(for_clipping=True) if for_clipping else ([norm], {})

    # ------------------------------------------------------------ substitution

    def _substitute(self) -> None:
        optimizer = self.optimizer
        if self.kind == "zero12":
            self._entries = [(p, (i,)) for i, group in enumerate(optimizer.bit16_groups) for p in group]
        else:
            self._entries = [(p, ()) for group in optimizer.fp16_groups for p in group if p.requires_grad]
        self._index = {id(p): i for i, (p, _) in enumerate(self._entries)}
        self._reduce: Callable[..., None] = optimizer.reduce_ready_partitions_and_remove_grads
        self._epilogue: Callable[[], None] = optimizer.overlapping_partition_gradients_reduce_epilogue
        optimizer.reduce_ready_partitions_and_remove_grads = self._reduce_one
        optimizer.overlapping_partition_gradients_reduce_epilogue = self._finish_backward
        if self.kind == "zero12":
            flat.point_only_what_moved(optimizer)
            if optimizer.partition_gradients:
                self._kept_sums = KeptSums(optimizer, self._let_update_read)
            optimizer._add_to_grad_partition_buffer = add_to
            if optimizer.cpu_offload and torch.device(self.ds.device).type == "cpu":
                HostGradients(optimizer)
            if self._one_rank:
                self._process = optimizer.process_gradients
                optimizer.process_gradients = self._process_or_leave
            if not optimizer.cpu_offload:
                optimizer.has_overflow = self._overflow
            self._global_norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = self._norm_zero12
            if not optimizer.partition_gradients:
                self._reduce_all = optimizer.reduce_gradients
                optimizer.reduce_gradients = self._reduce_all_stage1
        else:
            self._group_norms = optimizer._get_norm_groups
            optimizer._get_norm_groups = self._norm_zero3

    def _reduce_one(self, param: torch.nn.Parameter, *group: int) -> None:
        if self._deferred:
            return
        self._bring_up_state()
        self._see(param)
        self._reduce(param, *group)

    def kept_sums(self) -> list[torch.Tensor]:
        """Memory of sums of gradients that stays from step to step, where DeepSpeed knows nothing of it."""
        return [] if self._kept_sums is None else self._kept_sums.tensors()

    def _see(self, param: torch.nn.Parameter) -> None:
        """Note that a parameter's gradient has come.

        Raises:
            ModelError: for the second time in one backward: what is reduced already would be lost at stage 3.
        """
        index = self._index[id(param)]
        if index in self._seen and self.during_backward and not (self.alone or self.straight):
            shape = tuple(zero.full_shape(param))
            raise ModelError(
                f"the gradient of a parameter of shape {shape} came in two parts of one backward: reentrant checkpoints share it. "
                "Call torch.utils.checkpoint with use_reentrant=False, or use ZeRO stage 1."
            )
        self._seen[index] = None

    def _bring_up_state(self) -> None:
        """With the first gradient of a step's last backward, the first optimizer state may come up the idle bus."""
        if self.stream is None or self._seen:
            return
        self.stream.ask_rest()
        spilled = self.stream.gradients
        if self.ds.is_gradient_accumulation_boundary() and not (spilled is not None and spilled.holds_sums):
            self.stream.prefetch()

    def _let_update_read(self) -> None:
        if self.stream is not None:
            self.stream.let_update_read()

    def _process_or_leave(self, param: torch.nn.Parameter, group: int) -> None:
        if not (self.alone or self.straight):
            self._process(param, group)
            return
        self._bring_up_state()
        self._see(param)
        if self.straight:
            self._add_straight(param)
        elif self.stream is not None and self.stream.gradients is not None:
            self.stream.gradients.leave(param, norm_of)

    def _add_straight(self, param: torch.nn.Parameter) -> None:
        """One rank: add a gradient to its place in DeepSpeed's buffer of wider sums, in which all begin as zeros."""
        if not self._sums:
            self._sums = dict(zip(map(id, self._summed_params()), self._wide_sums()))
        if param.grad is not None and param.numel():
            add_to(self._sums[id(param)].view(-1), param.grad.view(-1))
        param.grad = None

    def _summed_params(self) -> list[torch.nn.Parameter]:
        """In the order of the sums."""
        return [p for params in self.optimizer.params_in_partition for p in params if p.numel()]

    def _wide_sums(self) -> list[torch.Tensor]:
        o = self.optimizer
        return _unpadded({i: o._get_compact_grad_partition_buffer(i) for i in range(len(o.params_in_partition))})

    def _hand_over_sums(self) -> None:
        """One rank: DeepSpeed's step finds the sums where it looks for them."""
        if self.optimizer.is_gradient_accumulation_boundary():
            self._norms = torch.stack(norms_of(self._wide_sums()))
            if not self._flags.summing:
                self._flags.take(self._norms, self._summed_params())
            self._sums = {}
        self.optimizer._epilogue_ran_this_backward = True

    def _hand_over(self) -> None:
        """One rank: what autograd has accumulated is the averaged gradient; the step finds it in the partition's order."""
        optimizer = self.optimizer
        if optimizer.is_gradient_accumulation_boundary():
            spilled = None if self.stream is None else self.stream.gradients
            if self.stream is not None and spilled is not None:
                self.stream.prefetch()  # where sums of earlier micro batches had the bus until now
                spilled.settle()
            found = [self._gradients_of(params, spilled) for params in optimizer.params_in_partition]
            self._norms = torch.stack([norm for group in found for _, norm in group])
            if not self._flags.summing:
                self._flags.take(self._norms, [p for params in optimizer.params_in_partition for p in params])
            for i, (params, group) in enumerate(zip(optimizer.params_in_partition, found)):
                grads = [grad for grad, _ in group]
                pad = int(optimizer.partition_size[i]) - sum(g.numel() for g in grads)
                if pad:
                    grads.append(params[0].new_zeros(pad))
                    grads[-1]._zero_padding = True  # type: ignore[attr-defined]
                optimizer.averaged_gradients[i] = grads
        optimizer._epilogue_ran_this_backward = True

    @staticmethod
    def _gradients_of(params: Sequence[torch.nn.Parameter], spilled: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(gradient, its norm) of each, zeros where there is none; they are taken away from the parameters."""
        on_host = [None if spilled is None else spilled.take(p) for p in params]
        here = [p.new_zeros(p.shape) if p.grad is None else p.grad for p, away in zip(params, on_host) if away is None]
        for p in params:
            p.grad = None
        found = zip(here, norms_of(here))
        return [next(found) if away is None else away for away in on_host]

    def _finish_backward(self) -> None:
        """Reduce what has not been reduced, zeros where there is no gradient, then let DeepSpeed finish."""
        if self.alone:
            self._seen.clear()
            return self._hand_over()
        if self.straight:
            self._seen.clear()
            return self._hand_over_sums()
        missing = [entry for i, entry in enumerate(self._entries) if i not in self._seen]
        if missing and self.kind == "zero12":
            self.optimizer.setup_buckets()
        for param, group in missing:
            if param.grad is None and self._accumulated(param) is None:
                zeros = torch.zeros(zero.full_shape(param), dtype=param.dtype, device=self.ds.device)
                placeholder, param.data = param.data, zeros  # torch checks a gradient's shape against the data of the moment
                param.grad, param.data = zeros, placeholder
            self._reduce(param, *group)
        self.order_hash = hash((self.order_hash, self._deferred, tuple(self._seen)))
        self._seen.clear()
        self._deferred = False
        self._epilogue()

    def _accumulated(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        if self.kind == "zero12" and self.optimizer.use_grad_accum_attribute:
            return param.grad_accum  # type: ignore[attr-defined]
        return None

    def _reduce_all_stage1(self, **kwargs: Any) -> None:
        """Stage 1 reduces once a step, in one order: give each parameter that this rank did not use a zero gradient."""
        optimizer = self.optimizer
        optimizer.setup_buckets()
        for param, _ in self._entries:
            if optimizer.use_grad_accum_attribute:
                if param.grad_accum is None:  # type: ignore[attr-defined]
                    param.grad_accum = torch.zeros_like(param, dtype=optimizer.gradient_accumulation_dtype)  # type: ignore[attr-defined]
            elif param.grad is None:
                param.grad = torch.zeros_like(param)
        self._reduce_all(**kwargs)

    def _overflow(self, partition_gradients: bool = True) -> bool:
        """DeepSpeed reads every gradient for it, through fp32 copies, and asks all ranks: their norm tells both.

        On two H200 the update of 1.2e9 parameters ended 33.7 ms after backward with it, on one without it 12.5 ms (docs/log.md).
        """
        if self._refuse:
            return True
        self._taken = self._norm_of_partitions()
        return float(self._taken) < 0.0

    def _norm_zero12(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._refuse:
            return torch.tensor(INVALID_NORM, device=self.optimizer.device)
        norm, self._taken = self._taken, None
        if norm is None:
            norm = self._global_norm(*args, **kwargs) if self.optimizer.cpu_offload else self._norm_of_partitions()
        self._norm = float(norm)
        return norm

    def _norm_of_partitions(self) -> torch.Tensor:
        """DeepSpeed's norm without its fp64 copy of every gradient: that of the gradients' own norms, in fp64."""
        optimizer = self.optimizer
        norms, self._norms = self._norms, None
        if norms is None:
            each = norms_of(_unpadded(optimizer.averaged_gradients))
            norms = torch.stack(each) if each else torch.zeros(1, device=optimizer.device)
        total = norms.double().square().sum()
        torch.distributed.all_reduce(total, group=optimizer.dp_process_group)
        norm = total.sqrt().float()
        return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, INVALID_NORM))

    def _norm_zero3(self) -> list[torch.Tensor]:
        if self._refuse:
            return [torch.tensor(INVALID_NORM, device=self.ds.device)]
        norms = self._group_norms()
        values = torch.stack([torch.as_tensor(n).float().reshape(()) for n in norms]).tolist()
        self._norm = math.sqrt(math.fsum(v * v for v in values)) if min(values) >= 0.0 else math.nan
        return norms

    def finish_update(self, states: bool = False) -> None:
        """Whoever reads weights calls it: an update may still be running. With `states`, whoever reads optimizer state."""
        if self.stream is not None:
            if states:
                self.stream.synchronize()
            else:
                self.stream.finish()


def _unpadded(averaged: Mapping[int, Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """A partition's gradients without what fills it up."""
    return [g for group in averaged.values() for g in group if not getattr(g, "_zero_padding", False)]
